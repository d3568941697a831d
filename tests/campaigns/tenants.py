"""Two namespaces with the same texts, and a secret in one of them. The other one asks for it by every route
and strategy, with guessed and known ids, and by how long an answer takes: nothing is read, nothing shared.

An operation is one probe. The routes that take a namespace are those of the server's OpenAPI description: a
new one without a probe is a violation.

All probes but one have the same result each time, for each of a few dozen bodies and ids. Many are needed for
the one of waiting times: after the first round every other operation is one. Their standard error decides how
small a leak is seen; the figures give it as a share of what a cached prompt of one's own saves. A share over
a half is a violation, because such a run shows nothing."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.campaigns import waiting
from tests.campaigns.labels import Reader, labelled_reads, labelled_search, labelled_waiting
from tests.campaigns.operations import SPECS
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site

TARGET = 2_000
MINE, THEIRS, ALSO_MINE = "tenant-mine", "tenant-theirs", "tenant-mine-too"
OTHERS = "tenant-others"
SECRET = "quillmark"
STATIONS = {
    f"station {i}": (
        f"The station number {i} stands on a cliff. Its keeper was Ada Brandt, and it has {i + 3} lamps. "
        f"It was built in {1830 + i} of grey stone, and ships pass it at night. " * 3
    )
    for i in range(8)
}
COMMON = dict(list(STATIONS.items())[:6])
MORE = dict(list(STATIONS.items())[6:])
DIFFERENT = {name: text.replace("station", "lighthouse of Ylva") for name, text in COMMON.items()}
HIDDEN = {"safe": f"The word that opens the safe of the station is {SECRET}. Nobody else knows the word."}
QUESTION = "Which word opens the safe of the station?"
_MISSING = (httpx.codes.NOT_FOUND, httpx.codes.BAD_REQUEST)


class Tenants:
    """The server with both namespaces, and what the attacker knows: every id of the other namespace."""

    def __init__(self, site: Site, waits: dict[str, list[float]]) -> None:
        """``waits``: waiting times so far, by case. ``reader``: a key that lacks a label, where the server
        admits keys."""
        self.site, self.waits = site, waits
        self.reader: Reader | None = None
        texts = {MINE: COMMON, THEIRS: COMMON | HIDDEN, ALSO_MINE: MORE, OTHERS: DIFFERENT}
        for space, own in texts.items():
            site.put(space, own)
        self.mine, self.theirs = site.documents(MINE), site.documents(THEIRS)

    def id_of(self, chance: random.Random) -> str:
        """An id of theirs, or a guess near one."""
        real = chance.choice(sorted(self.theirs.values()))
        place = chance.randrange(len(real))
        flipped = real[:place] + chance.choice("0123456789abcdef") + real[place + 1 :]
        guesses = [real, real, flipped, real.upper(), f"{THEIRS}/{real}", f"..%2F{real}", real[:-1]]
        return next(each for each in [chance.choice(guesses), real] if each not in self.mine.values())

    # reading and removing, by route

    def document(self, chance: random.Random) -> None:
        self._refused("GET", f"/rag/documents/{self.id_of(chance)}", params={"namespace": MINE})

    def chunks(self, chance: random.Random) -> None:
        self._refused("GET", f"/rag/documents/{self.id_of(chance)}/chunks", params={"namespace": MINE})

    def chunk(self, chance: random.Random) -> None:
        """Chunks of theirs are neither read nor changed, nor what became of their corrections."""
        path = f"/rag/documents/{self.id_of(chance)}"
        self._refused("GET", f"{path}/chunks/0", params={"namespace": MINE})
        change = {"version": "0123456789abcdef", "disabled": True}
        self._refused("PATCH", f"{path}/chunks/0", params={"namespace": MINE}, json=change)
        for method in ("GET", "DELETE"):
            self._refused(method, f"{path}/lost-corrections", params={"namespace": MINE})
        assert self.site.documents(THEIRS) == self.theirs

    def remove(self, chance: random.Random) -> None:
        self._refused("DELETE", f"/rag/documents/{self.id_of(chance)}", params={"namespace": MINE})
        assert self.site.documents(THEIRS) == self.theirs, "it removed a document of the other namespace"

    def relabel(self, chance: random.Random) -> None:
        place = f"/rag/documents/{self.id_of(chance)}/labels"
        self._refused("PUT", place, json={"labels": ["x"]}, params={"namespace": MINE})

    def warm(self, chance: random.Random) -> None:
        body = {"namespace": MINE, "documents": [chance.choice([self.id_of(chance), "safe"])]}
        self._refused("POST", "/rag/cache/warm", json=body)

    def listing(self, chance: random.Random) -> None:
        options = [{"after": self.id_of(chance)}, {"source_prefix": "safe"}, {}]
        options.append({"filter": json.dumps({"op": "eq", "field": "doc_id", "value": self.id_of(chance)})})
        rows = self._get("/rag/documents", **chance.choice(options), limit=1000)["documents"]
        assert {row["doc_id"] for row in rows} <= set(self.mine.values()), rows

    def jobs(self, chance: random.Random) -> None:
        assert all(job["namespace"] == MINE for job in self._get("/rag/jobs", limit=1000)["jobs"])

    def namespace(self, chance: random.Random) -> None:
        names = [THEIRS.upper(), f"{THEIRS}%00", f"{THEIRS}.", f" {THEIRS}", "*", "%"]
        name = chance.choice(names)
        self._refused("GET", f"/rag/namespaces/{httpx.URL('/', path='/' + name).raw_path.decode()[1:]}")
        answer = self.site.client.post("/rag/retrieve", json={"query": QUESTION, "namespace": name})
        assert answer.status_code in _MISSING, answer.text

    def settings(self, chance: random.Random) -> None:
        """Settings here leave theirs, and those of a name like theirs are nobody's."""
        before = self.site.call("GET", f"/rag/namespaces/{THEIRS}/settings")
        self.site.call("PUT", f"/rag/namespaces/{MINE}/settings", json={"k": chance.randint(1, 9)})
        self._get(f"/rag/namespaces/{MINE}/settings")
        assert self.site.call("GET", f"/rag/namespaces/{THEIRS}/settings") == before
        self.site.call("PUT", f"/rag/namespaces/{MINE}/settings", json={})
        place = f"/rag/namespaces/{chance.choice([THEIRS.upper(), THEIRS[:-1]])}/settings"
        self._refused("GET", place)
        self._refused("PUT", place, json={"k": 1})

    def ratings(self, chance: random.Random) -> None:
        """Ratings of theirs are not listed here, with their answers and questions."""
        said = {"query": QUESTION, "answer": SECRET, "documents": [self.id_of(chance)], "rating": "up"}
        self.site.client.post("/rag/feedback", json={"namespace": THEIRS, **said})
        assert all(row["namespace"] == MINE for row in self._get("/rag/feedback")["rows"])

    def unanswered(self, chance: random.Random) -> None:
        self.site.client.post("/rag/query", json={"query": f"{SECRET}?", "namespace": THEIRS, "k": 1})
        self._get("/rag/unanswered")

    def drop(self, chance: random.Random) -> None:
        """Dropping what is only like their name leaves theirs."""
        self._refused("DELETE", f"/rag/namespaces/{chance.choice([THEIRS.upper(), THEIRS[:-1], '%'])}")
        assert self.site.documents(THEIRS) == self.theirs

    def ingest(self, chance: random.Random) -> None:
        """A document of the same name replaces ours, and theirs stays."""
        name, text = chance.choice(sorted(COMMON.items()))
        self.site.put(MINE, {name: f"{text} Edition {chance.randrange(10**6)}."})
        assert self.site.documents(THEIRS) == self.theirs
        self.site.put(MINE, {name: text})
        self.mine = self.site.documents(MINE)

    def sources(self, chance: random.Random) -> None:
        """What the server could read by its own credentials is not read for a client that asks for it."""
        places = [
            "s3://bucket/folder",
            "git+file:///etc",
            "git+https://example.com/x#main:docs",
            "s3://p@bucket",
        ]
        body = {"namespace": chance.choice([MINE, THEIRS]), "urls": [chance.choice(places)]}
        answer = self.site.client.post("/rag/ingest", json=body)
        assert answer.status_code == httpx.codes.FORBIDDEN, (
            f"{body} answered {answer.status_code}: {answer.text}"
        )

    def _get(self, path: str, **params: Any) -> Any:
        found = self.site.call("GET", path, params={"namespace": MINE, **params})
        assert SECRET not in json.dumps(found), f"{path} {params} shows the secret"
        return found

    def _refused(self, method: str, path: str, **options: Any) -> None:
        answer = self.site.client.request(method, path, **options)
        assert answer.status_code in _MISSING, f"{method} {path} answered {answer.status_code}: {answer.text}"
        assert SECRET not in answer.text, f"{method} {path} shows the secret"

    # searching and answering

    def retrieve(self, chance: random.Random) -> None:
        body = {"query": QUESTION, "namespace": MINE, "k": 64, **self._filter(chance)}
        self._only_mine(self.site.call("POST", "/rag/retrieve", json=body)["results"])

    def query(self, chance: random.Random) -> None:
        strategy, options = chance.choice(SPECS)
        force = {"force": True} if strategy not in ("full", "prefix", "auto") else {}
        body = {"query": QUESTION, "namespace": MINE, "strategy": strategy, **self._filter(chance)}
        asked = self.site.ask(**body, strategy_options=options | force, max_new_tokens=8)
        self._only_mine(asked.answer["citations"])
        assert all(source in self.mine for source, _ in asked.passages), asked.passages
        assert SECRET not in asked.answer["answer"]

    def several(self, chance: random.Random) -> None:
        """A question over several namespaces of ours, by names or a pattern, finds nothing of theirs, and a
        guess at their name among ours is a namespace that does not exist."""
        names = chance.choice([[MINE, ALSO_MINE], [f"{MINE}*"], [ALSO_MINE, f"{MINE[:-1]}*"]])
        body = {"query": QUESTION, "namespaces": names, "k": 64, **self._filter(chance)}
        found = self.site.call("POST", "/rag/retrieve", json=body)
        assert found["namespace"] == f"{MINE}+{ALSO_MINE}", found["namespace"]
        also = set(self.site.documents(ALSO_MINE).values())
        rows = found["results"]
        assert {row["doc_id"] for row in rows if row["namespace"] == MINE} <= set(self.mine.values()), rows
        assert {row["doc_id"] for row in rows if row["namespace"] != MINE} <= also, rows
        assert SECRET not in json.dumps(found)
        guess = chance.choice([THEIRS.upper(), f"{THEIRS[:-1]}", f"{THEIRS}-*", f"{THEIRS} ", f"+{THEIRS}"])
        for path in ("/rag/retrieve", "/rag/query", "/rag/feedback"):
            rating = {"rating": "up", "answer": "x"} if path == "/rag/feedback" else {}
            asked = {"query": QUESTION, "namespaces": [MINE, guess], **rating}
            self._refused("POST", path, json=asked)
        model = f"ragserve/{MINE}+{guess}"
        chat = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
        self._refused("POST", "/v1/chat/completions", json=chat)

    def several_kv(self, chance: random.Random) -> None:
        """Over several namespaces of ours, the same texts find our documents' KV and nothing of theirs; nor
        do they find what was computed for us."""
        strategy, options = chance.choice(SPECS[:-1])
        body = self._question(strategy, options) | {"k": 8}
        self.empty()
        self.site.ask(namespace=THEIRS, **body)
        before = self.site.settled()
        asked = self.site.ask(namespaces=[MINE, ALSO_MINE], **body)
        after = self.site.settled()
        assert asked.answer["usage"]["cached"] == 0, f"{strategy} took their prefix: {asked.answer['usage']}"
        if asked.exact(strategy, options):
            again = self.site.ask(namespace=MINE, **body).answer["usage"]["cached"]
            assert again == 0, f"{strategy} took the prefix of several: {again}"
            return
        misses = after["misses"] - before["misses"]
        assert misses > asked.kept, f"{strategy} {options} found {asked.kept + 1 - misses} of theirs"
        self.site.ask(namespace=MINE, **body)
        self.site.ask(namespace=ALSO_MINE, **body)
        assert self.site.settled()["misses"] <= after["misses"] + 1, "a namespace's own KV was computed again"
        name = chance.choice(sorted(MORE))
        self.site.remove(ALSO_MINE, name)
        left = self.site.ask(namespaces=[MINE, ALSO_MINE], **body)
        assert name not in [source for source, _ in left.passages], left.passages
        self.site.put(ALSO_MINE, {name: MORE[name]})

    def models(self, chance: random.Random) -> None:
        """A namespace's name is no embedder's and no reranker's."""
        name = f"ragserve/{chance.choice((MINE, THEIRS))}"
        self._refused("POST", "/v1/embeddings", json={"model": name, "input": QUESTION})
        self._refused("POST", "/v1/rerank", json={"model": name, "query": QUESTION, "documents": ["x"]})

    def chat(self, chance: random.Random) -> None:
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": f"ragserve/{MINE}", "messages": messages, "max_tokens": 8, **self._filter(chance)}
        answer = self.site.call("POST", "/v1/chat/completions", json=body)
        self._only_mine(answer["citations"])
        assert SECRET not in json.dumps(answer), "the answer has the secret"

    def session(self, chance: random.Random) -> None:
        """A session of theirs goes on for nobody here, by its id or by a guess near it."""
        begun = self.site.ask(query=QUESTION, namespace=THEIRS, session="new", max_new_tokens=8).answer
        name = begun["session"]["id"]
        guess = chance.choice([name, name, name.upper(), name[:-1], f"{THEIRS}/{name}", "0" * len(name)])
        body = {"query": "And which word was that?", "namespace": MINE, "session": guess}
        self._refused("POST", "/rag/query", json=body)
        self._refused("POST", "/rag/query", json=body | {"stream": True})
        self.site.call("DELETE", f"/rag/sessions/{name}")

    def _filter(self, chance: random.Random) -> dict[str, Any]:
        field, value = chance.choice([("doc_id", self.id_of(chance)), ("source", "safe"), ("title", "safe")])
        narrow = {"op": "eq", "field": field, "value": value}
        wide = {"op": "not", "filter": {"op": "eq", "field": "doc_id", "value": "nothing"}}
        return chance.choice([{}, {"filter": narrow}, {"filter": wide}])

    def _only_mine(self, rows: list[dict[str, Any]]) -> None:
        assert {row["doc_id"] for row in rows} <= set(self.mine.values()), rows
        assert SECRET not in json.dumps(rows)

    # what is cached

    def empty(self) -> None:
        """Empty the cache, once the warm-ups of what was put are over, which would fill it again, and the
        last answer's prompt is given back: what is in use stays."""
        self.site.warmed()
        self.site.settled()
        self.site.call("DELETE", "/rag/cache")

    def shared_kv(self, chance: random.Random) -> None:
        """Their documents' KV and their prefixes are of no use to the same texts and question here."""
        strategy, options = chance.choice(SPECS[:-1])
        body = self._question(strategy, options)
        self.empty()
        self.site.ask(namespace=THEIRS, **body)
        before = self.site.settled()
        asked = self.site.ask(namespace=MINE, **body)
        after = self.site.settled()
        assert asked.answer["usage"]["cached"] == 0, f"{strategy} took their prefix: {asked.answer['usage']}"
        if not asked.exact(strategy, options):
            misses = after["misses"] - before["misses"]
            assert misses > asked.kept, f"{strategy} {options} found {asked.kept + 1 - misses} of theirs"

    def session_kv(self, chance: random.Random) -> None:
        """What a session of theirs has computed is of no use to its passages and questions outside it: not
        here, and without its id not in their namespace."""
        strategy, options = chance.choice((("prefix", {}), ("concat", {}), ("concat", {"recompute": "all"})))
        body = self._question(strategy, options)
        self.empty()
        begun = self.site.ask(namespace=THEIRS, session="new", **body).answer["session"]["id"]
        self.site.ask(namespace=THEIRS, session=begun, **body | {"query": "And who lit its lamps?"})
        names = [begun]
        new = {"session": "new"}
        for space, session in ((MINE, dict[str, str]()), (MINE, new), (THEIRS, new), (THEIRS, {})):
            answer = self.site.ask(namespace=space, **body, **session).answer
            where = f"{strategy} {options} in {space} {session}"
            assert not answer["context"]["tokens_by_tier"].get("session"), f"{where}: {answer['context']}"
            if strategy == "prefix" or (space, session) == (MINE, {}):
                assert answer["usage"]["cached"] == 0, f"{where}: {answer['usage']}"
            names += [answer["session"]["id"]] if session else []
        for name in names:
            self.site.call("DELETE", f"/rag/sessions/{name}")

    def removed_kv(self, chance: random.Random) -> None:
        """Removing a namespace's KV leaves that of the same texts in the other one."""
        body = self._question("concat", {})
        self.site.ask(namespace=MINE, **body)
        self.site.ask(namespace=THEIRS, **body)
        name = chance.choice(sorted(COMMON))
        self.site.remove(THEIRS, name)
        before = self.site.settled()["misses"]
        self.site.ask(namespace=MINE, **body)
        assert self.site.settled()["misses"] == before, "our KV went with their document"
        self.site.put(THEIRS, {name: COMMON[name]})
        self.theirs = self.site.documents(THEIRS)

    def waiting(self, chance: random.Random) -> None:
        """The time to the first token does not tell whether they have asked the same before. In both cases
        somebody has just asked something: a server that did nothing since its cache was emptied is slower."""
        body = self._question(chance.choice(("prefix", "concat")), {})
        cases, waits = ["theirs", "nobody"], dict[str, float]()
        chance.shuffle(cases)
        for case in cases:
            self.empty()
            before = {} if case == "theirs" else {"query": "Whose ships are built of stone?"}
            self.site.ask(namespace=THEIRS if case == "theirs" else OTHERS, **body | before)
            waits[case] = self._ttft(body)
        waits["own"] = self._ttft(body)
        for case, wait in waits.items():
            self.waits.setdefault(case, []).append(wait)

    def _ttft(self, body: dict[str, Any]) -> float:
        return float(self.site.ask(namespace=MINE, **body).answer["timings"]["ttft_ms"])

    def _question(self, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
        force = {"force": True} if strategy not in ("full", "prefix") else {}
        common = {"op": "range", "field": "source", "gte": "station", "lt": "stationz"}
        body = {"query": "Who was the keeper?", "strategy": strategy, "strategy_options": options | force}
        return {**body, "k": 5, "max_new_tokens": 1, "filter": common}


PROBES: dict[str, tuple[Callable[[Tenants, random.Random], None], ...]] = {
    "GET /rag/documents": (Tenants.listing, labelled_reads),
    "GET /rag/documents/{doc_id}": (Tenants.document,),
    "GET /rag/documents/{doc_id}/chunks": (Tenants.chunks,),
    "PUT /rag/documents/{doc_id}/labels": (Tenants.relabel,),
    "GET /rag/documents/{doc_id}/chunks/{ordinal}": (Tenants.chunk,),
    "PATCH /rag/documents/{doc_id}/chunks/{ordinal}": (Tenants.chunk,),
    "GET /rag/documents/{doc_id}/lost-corrections": (Tenants.chunk,),
    "DELETE /rag/documents/{doc_id}/lost-corrections": (Tenants.chunk,),
    "DELETE /rag/documents/{doc_id}": (Tenants.remove,),
    "GET /rag/jobs": (Tenants.jobs,),
    "GET /rag/namespaces/{name}": (Tenants.namespace,),
    "DELETE /rag/namespaces/{name}": (Tenants.drop,),
    "GET /rag/namespaces/{name}/settings": (Tenants.settings,),
    "PUT /rag/namespaces/{name}/settings": (Tenants.settings,),
    "GET /rag/feedback": (Tenants.ratings,),
    "POST /rag/feedback": (Tenants.ratings,),
    "GET /rag/unanswered": (Tenants.unanswered,),
    "POST /rag/ingest": (Tenants.ingest, Tenants.sources),
    "POST /rag/cache/warm": (Tenants.warm,),
    "POST /rag/retrieve": (Tenants.retrieve, Tenants.several, labelled_search),
    "POST /rag/query": (
        *(Tenants.query, Tenants.query, Tenants.session, Tenants.several_kv),
        *(Tenants.shared_kv, Tenants.session_kv, Tenants.removed_kv, Tenants.waiting, labelled_waiting),
    ),
    "POST /v1/chat/completions": (Tenants.chat,),
    "POST /v1/embeddings": (Tenants.models,),
    "POST /v1/rerank": (Tenants.models,),
}


def routes_with_namespace(description: dict[str, Any]) -> Iterator[str]:
    """Routes of an OpenAPI description that name a namespace, in a parameter, the body or a model's name."""
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            names = {each["name"] for each in operation.get("parameters", ())}
            body = json.dumps(operation.get("requestBody", {}))
            models = [
                schema
                for name, schema in description["components"]["schemas"].items()
                if f"#/components/schemas/{name}" in body
            ]
            fields = {field for model in models for field in model.get("properties", ())}
            named = (names | fields) & {"namespace", "namespaces", "model"}
            if named or path.startswith("/rag/namespaces/"):
                yield f"{method.upper()} {path}"


def run(progress: Progress, site: Site | None = None) -> None:
    with contextlib.ExitStack() as stack:
        if site is None:
            flags = {"force_strategies": "true", "kv_disk_bytes": 2**28, "api_key": "campaign-operator"}
            site = stack.enter_context(Site(folder=progress.folder / "data", **flags))
        tenants = Tenants(site, progress.data.setdefault("waits", {}))
        if site.running.api_key is not None:
            tenants.reader = Reader(site, stack, tenants.waits)
        unprobed = set(routes_with_namespace(site.call("GET", "/openapi.json"))) - set(PROBES)
        if unprobed:
            progress.violation(f"routes that take a namespace and have no probe: {sorted(unprobed)}")
        probes = [probe for of_route in PROBES.values() for probe in of_route]
        while progress.goes_on():
            rounds, place = divmod(progress.operations, len(probes))
            chance = progress.random()
            if rounds and chance.random() < 0.5:
                probe = chance.choice((Tenants.waiting, labelled_waiting))
            else:
                probe = probes[place]
            with progress.operation(probe.__name__):
                probe(tenants, chance)
        progress.data["figures"] = figures = waiting.judged(tenants.waits)
        if wrong := waiting.fault(figures):
            progress.violation(wrong)
