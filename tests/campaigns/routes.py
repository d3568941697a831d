"""100,000 cheap operations on the HTTP routes and the index behind them, in one process without an engine:
its place is taken by a scripted one, and SGLang's app by one that echoes. Listings, searches, writes to the
index and removals, ingestion jobs now and then, and hostile values in each field of each route that a key
without admin may call, by several tasks, each with a namespace of its own.

Violations: a server error; an answer that does not show what was written before; a registry or an index with
a fault, looked at every `CHECK_EVERY` operations; memory that grows in the second half, as in `load`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psutil

from ragserve.api.app import create_app
from ragserve.config import DEFAULT_MODEL, Settings
from tests.campaigns.load import SIGMAS, by_minute, held_mib, slope_of
from tests.campaigns.mixed import HOSTILE, key_in
from tests.campaigns.progress import Progress
from tests.hostile import Hostile, requests, targets
from tests.unit.api.scripted_server import ScriptedEngine, chunk_of, upstream_app
from tests.unit.api.word_embedder import DIM, WordEmbedder

TARGET = 100_000
TASKS = 8
CHECK_EVERY = 5_000
NAMES = tuple(f"station {number}" for number in range(40))
_SAMPLE_S = 2.0
_ENDED = ("done", "failed", "cancelled")


class World:
    """The app, and what each namespace must have: the edition of each document."""

    def __init__(self, app: Any, key: str, tasks: int, hostile: list[list[Hostile]]) -> None:
        self.app, self.hostile = app, hostile
        self.store = app.state.services.store
        self.spaces = [f"mixed-{number}" for number in range(tasks)]
        self.editions: dict[str, dict[str, int]] = {space: {} for space in self.spaces}
        self._key = key.encode()
        for space in self.spaces:
            self.store.ensure_namespace(space, embedder="words", dim=DIM)

    async def call(
        self, method: str, url: str, body: bytes | None = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Status and body of an answer, by ASGI."""
        parts, sent, answer = urlsplit(url), False, bytearray()
        status = 0

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # the client stays
            sent = True
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))

        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + self._key)]
        headers += [(b"content-type", kind.encode()), (b"content-length", str(len(body or b"")).encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(parts.path, errors="replace"),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        await self.app(scope, receive, send)
        assert status, f"{method} {url[:200]} was not answered"
        said = bytes(answer[-300:])
        assert status < 500, f"{method} {url[:200]}: {status} {said!r}"
        assert b"event: error" not in answer, f"{method} {url[:200]}: {said!r}"
        return status, bytes(answer)

    async def read(self, method: str, url: str, **body: Any) -> Any:
        """The JSON of an answer that must be a success."""
        status, answer = await self.call(method, url, json.dumps(body).encode() if body else None)
        assert 200 <= status < 300, f"{method} {url[:200]}: {status} {answer[-300:]!r}"
        return json.loads(answer)

    async def check(self) -> None:
        """The registry and the indexes are whole, and each namespace has what was written."""
        for problems in await asyncio.to_thread(self.store.check):
            assert not problems.problems, problems
        for space in self.spaces:
            found = await self.read("GET", f"/rag/documents?namespace={space}&limit=1000")
            sources = {row["source"] for row in found["documents"]}
            assert sources == set(self.editions[space]), f"{space} has {sources}"


def _text(space: str, name: str, edition: int) -> str:
    return f"Edition {edition} of {name} in {space}: the lamp number {edition} is lit, at 1.5GB/s in C++17."


async def listing(world: World, space: str, chance: random.Random) -> None:
    url = chance.choice(
        (
            *(f"/rag/documents?namespace={space}&limit={limit}" for limit in (1, 10, 100)),
            *(f"/rag/namespaces/{space}", "/rag/namespaces", "/rag/jobs?limit=10"),
            *(f"/rag/sessions?namespace={space}", "/info", "/ready", "/v1/models", "/health"),
        )
    )
    await world.read("GET", url)


async def document(world: World, space: str, chance: random.Random) -> None:
    rows = (await world.read("GET", f"/rag/documents?namespace={space}&limit=5"))["documents"]
    for row in rows[:1]:
        own = f"/rag/documents/{row['doc_id']}"
        await world.read("GET", f"{own}?namespace={space}")
        chunks = (await world.read("GET", f"{own}/chunks?namespace={space}"))["chunks"]
        edition = world.editions[space][row["source"]]
        assert [chunk["text"] for chunk in chunks] == [_text(space, row["source"], edition)]


async def search(world: World, space: str, chance: random.Random) -> None:
    name = chance.choice(sorted(world.editions[space]) or NAMES)
    retrieval = chance.choice(("lexical", "hybrid", "dense"))
    question = f"Which lamp of {name} is lit?"
    found = await world.read(
        "POST", "/rag/retrieve", query=question, namespace=space, retrieval=retrieval, k=5
    )
    known = {_text(space, each, edition) for each, edition in world.editions[space].items()}
    assert {row["text"] for row in found["results"]} <= known
    assert len(found["results"]) == min(5, len(known)), found


async def write(world: World, space: str, chance: random.Random) -> None:
    editions = {name: chance.randrange(10**6) for name in chance.sample(NAMES, chance.choice((1, 3)))}
    batch = [chunk_of(name, _text(space, name, edition)) for name, edition in editions.items()]
    await asyncio.to_thread(world.store.replace_documents, space, batch)
    world.editions[space] |= editions


async def remove(world: World, space: str, chance: random.Random) -> None:
    if not world.editions[space]:
        return
    rows = (await world.read("GET", f"/rag/documents?namespace={space}&limit=100"))["documents"]
    row = chance.choice(rows)
    await world.read("DELETE", f"/rag/documents/{row['doc_id']}?namespace={space}")
    del world.editions[space][row["source"]]


async def drop(world: World, space: str, chance: random.Random) -> None:
    await world.read("DELETE", f"/rag/namespaces/{space}")
    world.editions[space] = {}
    await world.call("DELETE", f"/rag/namespaces/{HOSTILE}")
    for each in (space, HOSTILE):
        await asyncio.to_thread(world.store.ensure_namespace, each, embedder="words", dim=DIM)


async def job(world: World, space: str, chance: random.Random) -> None:
    """A job of a namespace that has no other documents."""
    own, name = f"{space}-jobs", chance.choice(NAMES)
    texts = [{"name": name, "text": _text(own, name, chance.randrange(10**6))}]
    found = await world.read("POST", "/rag/ingest", namespace=own, texts=texts)
    while found["state"] not in _ENDED:
        await asyncio.sleep(0.05)
        found = await world.read("GET", f"/rag/jobs/{found['job_id']}")
    assert found["state"] == "done", found


async def tokens(world: World, space: str, chance: random.Random) -> None:
    await world.read("POST", "/tokenize", prompt=[str(chance.random())] * chance.choice((1, 50)))


async def hostile(world: World, space: str, chance: random.Random) -> None:
    one = chance.choice(chance.choice(world.hostile))
    await world.call(one.method, one.url, one.content, one.type)


MIX: tuple[tuple[Callable[[World, str, random.Random], Coroutine[Any, Any, None]], float], ...] = (
    (listing, 40),
    (document, 8),
    (search, 15),
    (write, 8),
    (remove, 8),
    (drop, 0.5),
    (job, 0.2),
    (tokens, 8),
    (hostile, 12.3),
)


def run(progress: Progress, *, tasks: int = TASKS) -> None:
    """Run to the end, on a new folder."""
    folder = progress.folder / f"data-{time.time_ns()}"
    progress.operations = 0  # its folder is new, too
    progress.counts.clear()
    settings = Settings(data_dir=folder, model=str(DEFAULT_MODEL), verify_share=0, url_ingestion="off")
    engine, embedder = ScriptedEngine(DEFAULT_MODEL), WordEmbedder()
    app = create_app(settings, engine, upstream=upstream_app(_Nothing()), embedder=lambda _: embedder)
    remembered = (embedder.calls, engine.requests, engine.aborted, engine.forgotten)
    asyncio.run(_run(progress, app, folder, tasks, remembered))


async def _run(
    progress: Progress, app: Any, folder: Path, tasks: int, remembered: tuple[list[Any], ...]
) -> None:
    """``remembered``: what the scripted engine and embedder keep for tests."""
    async with app.router.lifespan_context(app):
        found = [list(requests(one)) for one in targets(app.openapi(), HOSTILE)]
        attacks = [[each for each in some if not each.url.startswith("/ping")] for some in found]
        world = World(app, key_in(folder), tasks, list(filter(None, attacks)))
        world.store.ensure_namespace(HOSTILE, embedder="words", dim=DIM)
        samples: list[list[float]] = []
        began = time.monotonic()
        number = itertools.count()
        process = psutil.Process()

        async def task(space: str) -> None:
            works, weights = zip(*MIX, strict=True)
            while progress.goes_on():
                chance = random.Random(f"routes {progress.seed} {next(number)}")
                (work,) = chance.choices(works, weights)
                with progress.operation(work.__name__):
                    await work(world, space, chance)

        async def sample() -> None:
            while True:
                minute = (time.monotonic() - began) / 60
                samples.append([round(minute, 3), round(sum(held_mib([process]).values()), 2)])
                for calls in remembered:
                    calls.clear()
                await asyncio.sleep(_SAMPLE_S)

        sampling = asyncio.create_task(sample())
        target = progress.target or TARGET
        for end in range(CHECK_EVERY, target + CHECK_EVERY, CHECK_EVERY):
            progress.target = min(end, target)
            await asyncio.gather(*map(task, world.spaces))
            with progress.operation("whole", 0):
                await world.check()
            if progress.operations < progress.target:  # no time is left
                break
        progress.target = target
        assert not sampling.done(), sampling.exception()
        sampling.cancel()
    minutes = samples[-1][0]
    slope, error = slope_of([by_minute(samples, minutes / 2)])
    progress.data["figures"] = {
        "memory MiB": samples[-1][1],
        "memory MiB at the beginning": samples[min(len(samples) - 1, 5)][1],
        "slope of the second half MiB/h": None if slope is None else round(slope, 2),
        "its standard error": None if error is None else round(error, 2),
        "hostile requests to draw from": sum(map(len, world.hostile)),
    }
    if slope is not None and error is not None and slope > SIGMAS * error:
        progress.violation(
            f"memory grows by {slope:.1f} MiB/h in the second half, standard error {error:.1f}"
        )


class _Nothing(list[Any]):
    """A list that keeps nothing of what the echoing app has seen."""

    def append(self, item: Any) -> None:
        return None
