"""An hour of everything at once on a real engine, by a key without admin: queries of all strategies, streamed
or not, half of whose clients leave, sessions, OpenAI's and SGLang's routes, searches, listings, ingestion and
removal, JSON schemas good and bad, and hostile values in each field of each route, while `/health` is asked.

Violations: an answer with a server error, or none in time; a health check that fails or takes over
`HEALTH_S`; memory that grows in the second half (see campaign `load`); a slot, page or request that is left.
Latencies are not judged: campaign `load` does, and what runs here at a time is not alike.

Where a cache has a bound, it is filled first: more JSON schemas than are kept. What a hostile request is
answered, beyond that it is no server error, is tested in `tests/unit/api/test_every_field.py`."""

from __future__ import annotations

import contextlib
import json
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from ragserve.errors import NotFound
from ragserve.tenants.key_file import KeyFile
from sglang_ext.sglang_internals.grammar_cache import MAX_ENTRIES
from tests.campaigns.load import DECODE, FLAGS, Done, document, watched
from tests.campaigns.operations import SPECS
from tests.campaigns.progress import Progress
from tests.campaigns.site import ENDED, Site
from tests.hostile import SCHEMAS, Hostile, requests, targets

TARGET = None
MINUTES = 60.0
HEALTH_S = 120.0  # on a machine whose cores are shared; a standstill has no end
SPACE, OWN, HOSTILE = "mixed-read", "mixed-own", "mixed-hostile"
DOCUMENTS = 40
CLIENTS = 4
ADMIN = "campaign-admin-key"
SETTINGS: dict[str, Any] = {
    **FLAGS,
    "api_key": ADMIN,
    "session_ttl_s": 60,
    "url_ingestion": "off",
    "context_length": 2048,
}
_ANSWER_S = 300.0  # of a busy machine; a standstill has no end
_FILES: tuple[tuple[str, bytes], ...] = (
    ("harbour.md", b"---\ntitle: Harbours\n---\n# Oban\n\nThe harbour of Oban is 8.5 m deep.\n"),
    ("fees.csv", b"port;fee\nOban;8,50\nMallaig;7,20\n"),
    ("page.html", b"<html><title>Fees</title><body><h1>Fees</h1><p>A berth costs 5 &euro; a night.</p>"),
    ("lines.jsonl", b'{"port": "Oban", "depth": 8.5}\n{"port": "Mallaig", "depth": 6}\n'),
    ("letter.eml", b"Subject: Ferry\nFrom: a@example.org\n\nThe ferry leaves at nine.\n"),
    ("broken.pdf", b"%PDF-1.7 and nothing else"),
    ("noise.bin", bytes(range(256)) * 8),
    ("empty.txt", b""),
)


class Failure(AssertionError):
    """What a client saw that it should not."""


class Caller:
    """One client of the key; each of its methods is an operation. ``number``: of the client, whose documents
    are its own."""

    def __init__(
        self, site: Site, key: str, chance: random.Random, number: int, hostile: list[list[Hostile]]
    ):
        self.site, self.chance, self.number, self._hostile = site, chance, number, hostile
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=site.url, headers=self.headers, timeout=_ANSWER_S)

    def _ok(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self.client.request(method, path, **options)
        if not answer.is_success or "event: error" in answer.text:
            raise Failure(f"{method} {path} {options} answered {answer.status_code}: {answer.text[-400:]}")
        return answer

    def _question(self) -> dict[str, Any]:
        chance = self.chance
        strategy, options = chance.choice(SPECS)
        force = {"force": True} if strategy not in ("full", "prefix", "auto") else {}
        return {
            "query": f"Who was the keeper of station {chance.randrange(DOCUMENTS)}?",
            "namespace": SPACE,
            "k": chance.choice((1, 3, 4)),
            "strategy": strategy,
            "strategy_options": options | force,
            "decode": chance.choice(DECODE) if self.site.own else {},
            "max_new_tokens": chance.choice((2, 8, 16)),
            "stream": chance.random() < 0.5,
            "temperature": chance.choice((0, 0, 0.8)),
        }

    # what runs the model

    def query(self) -> None:
        self._ok("POST", "/rag/query", json=self._question())

    def leave(self) -> None:
        path, body = "/rag/query", self._question() | {"max_new_tokens": 200}
        if self.chance.random() < 0.4:
            path, body = "/v1/chat/completions", self._chat("default") | {"max_tokens": 200}
        self.site.leave(self.chance.uniform(0, 1.0), path=path, headers=self.headers, **body)

    def session(self) -> None:
        """A dialogue of up to three turns; half of them are left to expire."""
        name, strategy = "new", self.chance.choice(("full", "prefix", "concat"))
        options = {"force": True} if strategy == "concat" else {}
        kept = {"strategy": strategy, "strategy_options": options, "stream": False}
        for _ in range(self.chance.randint(1, 3)):
            body = self._question() | kept | {"session": name}
            answer = self.client.post("/rag/query", json=body)
            if answer.status_code == httpx.codes.CONFLICT:  # a document of it was replaced
                return
            if not answer.is_success:
                raise Failure(f"a turn answered {answer.status_code}: {answer.text[-400:]}")
            name = answer.json()["session"]["id"]
        if self.chance.random() < 0.5:
            self._ok("DELETE", f"/rag/sessions/{name}")

    def _chat(self, model: str) -> dict[str, Any]:
        message = {"role": "user", "content": f"Who keeps station {self.chance.randrange(DOCUMENTS)}?"}
        stream = self.chance.random() < 0.5
        return {"model": model, "messages": [message], "max_tokens": 6, "stream": stream}

    def chat(self) -> None:
        model = self.chance.choice((f"ragserve/{SPACE}", f"ragserve/{SPACE}", "default"))
        self._ok("POST", "/v1/chat/completions", json=self._chat(model))

    def schema(self) -> None:
        """A schema of the request's own, so that none is found again."""
        name = f"p{self.chance.randrange(2**40)}"
        properties = {name: {"type": "integer"}, "kind": {"enum": ["a", "b"]}}
        given = {"type": "object", "properties": properties, "required": [name]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}
        body = self._chat("default") | {"response_format": form, "stream": False, "max_tokens": 2}
        self._ok("POST", "/v1/chat/completions", json=body)

    def bad_schema(self) -> None:
        given = self.chance.choice(SCHEMAS)
        text = given if isinstance(given, str) else json.dumps(given)
        if self.chance.random() < 0.5 and not isinstance(given, str):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}
            body = self._chat("default") | {"response_format": form}
            request = Hostile("POST", "/v1/chat/completions", "a schema", json.dumps(body).encode())
        else:
            sampling = {"max_new_tokens": 2, "json_schema": text}
            body = {"text": "A", "sampling_params": sampling}
            request = Hostile("POST", "/generate", f"schema {text[:80]}", json.dumps(body).encode())
        self._send(request)

    # what does not

    def retrieve(self) -> None:
        chance = self.chance
        body = {
            "query": chance.choice(("Who kept the lamp of station 7?", "lamp", "C++ 10 km/h", "stationn")),
            "namespace": SPACE,
            "retrieval": chance.choice(("lexical", "dense", "hybrid")),
            "k": chance.choice((1, 5, 30)),
            "neighbours": chance.choice((0, 1)),
            "dedupe": chance.choice((0, 0.8)),
        }
        if chance.random() < 0.3:
            body["filter"] = {"op": "eq", "field": "title", "value": "station 3"}
        if chance.random() < 0.3:
            body["history"] = [
                {"role": "user", "content": "Who kept station 3?"},
                {"role": "assistant", "content": "Ada Brandt [1]."},
            ]
            body["follow_ups"] = chance.choice(("context", "alone"))
        self._ok("POST", "/rag/retrieve", json=body)

    def look(self) -> None:
        chance = self.chance
        paths = (
            *("/info", "/ready", "/rag/jobs", "/rag/namespaces", "/v1/models", "/docs", "/model_info"),
            *(f"/rag/namespaces/{SPACE}", f"/rag/sessions?namespace={SPACE}"),
            *(f"/rag/documents?namespace={SPACE}&limit={n}" for n in (1, 100)),
        )
        found = self._ok("GET", chance.choice(paths))
        rows = found.json().get("documents") if "documents?" in str(found.url) else None
        if rows:
            of = f"/rag/documents/{chance.choice(rows)['doc_id']}"
            answer = self.client.get(f"{of}{chance.choice(('', '/chunks'))}", params={"namespace": SPACE})
            if answer.status_code not in (200, 404):  # replaced meanwhile
                raise Failure(f"{of} answered {answer.status_code}: {answer.text[-400:]}")

    def tokens(self) -> None:
        text = " ".join(str(self.chance.random()) for _ in range(self.chance.choice((1, 20))))
        ids = self._ok("POST", "/tokenize", json={"prompt": text}).json()["tokens"]
        self._ok("POST", "/detokenize", json={"tokens": ids})

    # what writes

    def replace(self) -> None:
        number, edition = self.chance.randrange(DOCUMENTS), self.chance.randrange(10**6)
        name, text = document(number, edition, 0)
        self._ingested(SPACE, json={"namespace": SPACE, "texts": [{"name": name, "text": text}]})

    def ingest(self) -> None:
        """Texts or files; then some of them go, or all. The namespace is this client's."""
        space = f"{OWN}-{self.number}"
        if self.chance.random() < 0.5:
            texts = [
                {
                    "name": f"t{n}",
                    "text": f"Note {self.chance.random()} of the harbour.",
                    "metadata": {"n": n},
                }
                for n in range(self.chance.choice((1, 20)))
            ]
            self._ingested(space, json={"namespace": space, "texts": texts})
        else:
            files = [("files", file) for file in self.chance.sample(_FILES, 3)]
            self._ingested(space, data={"namespace": space}, files=files)
        if self.chance.random() < 0.3:
            self._ok("DELETE", f"/rag/namespaces/{space}")
            return
        rows = self._ok("GET", "/rag/documents", params={"namespace": space, "limit": 1000}).json()[
            "documents"
        ]
        for row in self.chance.sample(rows, len(rows) // 2):
            self._ok("DELETE", f"/rag/documents/{row['doc_id']}", params={"namespace": space})

    def _ingested(self, space: str, **body: Any) -> None:
        job = self._ok("POST", "/rag/ingest", **body).json()
        deadline = time.monotonic() + _ANSWER_S
        while job["state"] not in ENDED:
            if time.monotonic() > deadline:
                raise Failure(f"the job does not end: {job}")
            time.sleep(0.1)
            job = self._ok("GET", f"/rag/jobs/{job['job_id']}").json()
        if job["state"] != "done":
            raise Failure(f"the job of {space} ended so: {job}")

    # what nobody should send

    def hostile(self) -> None:
        self._send(self.chance.choice(self.chance.choice(self._hostile)))

    def clear(self) -> None:
        """Remove what hostile requests have ingested."""
        self.client.delete(f"/rag/namespaces/{HOSTILE}")
        self._ingested(HOSTILE, json={"namespace": HOSTILE, "texts": [{"name": "a", "text": "A lamp."}]})

    def _send(self, request: Hostile) -> None:
        """Each gets an answer that is none of a fault. A closed connection is one."""
        try:
            answer = self.client.request(
                request.method, request.url, content=request.content, headers={"Content-Type": request.type}
            )
        except httpx.TransportError as error:
            raise Failure(f"{request.method} {request.url[:200]}, {request.what}: {error!r}") from error
        if answer.status_code >= 500 or "event: error" in answer.text:
            said = answer.text[-300:]
            raise Failure(
                f"{request.method} {request.url[:200]}, {request.what}: {answer.status_code} {said}"
            )


MIX: tuple[tuple[Callable[[Caller], None], int], ...] = (
    (Caller.query, 18),
    (Caller.leave, 10),
    (Caller.session, 4),
    (Caller.chat, 8),
    (Caller.schema, 3),
    (Caller.bad_schema, 4),
    (Caller.retrieve, 12),
    (Caller.look, 12),
    (Caller.tokens, 4),
    (Caller.replace, 1),
    (Caller.ingest, 2),
    (Caller.hostile, 21),
    (Caller.clear, 1),
)


class Crowd:
    """Threads of clients, and one that asks for the server's health, until ``stop``."""

    def __init__(
        self,
        site: Site,
        key: str,
        seed: str,
        hostile: list[list[Hostile]],
        mix: tuple[tuple[Callable[[Caller], None], int], ...],
        clients: int,
    ) -> None:
        self.results: queue.Queue[Done] = queue.Queue()
        self.health: list[float] = []
        self._site, self._mix = site, mix
        self._end = threading.Event()
        callers = [Caller(site, key, random.Random(f"{seed} {i}"), i, hostile) for i in range(clients)]
        self._threads = [threading.Thread(target=self._client, args=(one,), daemon=True) for one in callers]
        self._threads.append(threading.Thread(target=self._healthy, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _client(self, caller: Caller) -> None:
        works, weights = zip(*self._mix, strict=True)
        with caller.client:
            while not self._end.is_set():
                (work,) = caller.chance.choices(works, weights)
                began = time.monotonic()
                try:
                    work(caller)
                except (Failure, httpx.HTTPError, OSError, ValueError, LookupError) as error:
                    self.results.put(Done(work.__name__, failure=str(error) or repr(error)))
                    self._end.wait(1.0)
                else:
                    label = work.__name__ if work in (Caller.query, Caller.retrieve, Caller.look) else ""
                    self.results.put(Done(work.__name__, label, time.monotonic() - began))

    def _healthy(self) -> None:
        with httpx.Client(base_url=self._site.url, timeout=HEALTH_S) as client:
            while not self._end.wait(1.0):
                began = time.monotonic()
                try:
                    status = client.get("/health").status_code
                    failure = "" if status == httpx.codes.OK else f"/health answered {status}"
                except httpx.HTTPError as error:
                    failure = f"/health: {error!r}"
                self.health.append(time.monotonic() - began)
                self.results.put(Done("health", failure=failure))


def run(
    progress: Progress,
    site: Site | None = None,
    *,
    mix: tuple[tuple[Callable[[Caller], None], int], ...] = MIX,
    clients: int = CLIENTS,
    schemas: int = MAX_ENTRIES + 100,
    **options: Any,
) -> None:
    """``schemas``: so many distinct ones are sent first. ``options``: settings of the server."""
    with contextlib.ExitStack() as stack:
        if site is None:
            site = stack.enter_context(Site(folder=progress.folder / "data", **(SETTINGS | options)))
        key = key_in(site.running.data_dir) if site.own else ""  # one closes a server to everybody else
        hostile = [list(requests(one)) for one in targets(site.call("GET", "/openapi.json"), HOSTILE)]
        site.put(SPACE, dict(document(number, 0, 0) for number in range(DOCUMENTS)))
        first = Caller(site, key, random.Random(f"mixed {progress.seed} first"), clients, hostile)
        with first.client:
            first.clear()
            for _ in range(schemas):
                first.schema()
        crowd = Crowd(site, key, f"mixed {progress.seed} {progress.operations}", hostile, mix, clients)
        figures = watched(progress, site, crowd)
        health = sorted(crowd.health)
        figures["health ms p50"] = round(1000 * health[len(health) // 2])
        figures["health ms p99"] = round(1000 * health[len(health) * 99 // 100])
        figures["health ms most"] = round(1000 * health[-1])
        figures["hostile requests to draw from"] = sum(map(len, hostile))


def key_in(folder: Path) -> str:
    """A key without admin, of namespaces that begin with ``mixed-``."""
    keys = KeyFile(folder)
    with contextlib.suppress(NotFound):  # of a run that was killed
        keys.revoke("campaign")
    return keys.create("campaign", ["mixed-*"], ["read", "ingest", "delete"])[1]
