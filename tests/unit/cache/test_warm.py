"""Warm-up jobs over an engine that keeps a ledger instead of KV: what is computed, skipped, refused and
reported.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.cache import lock as serving
from ragserve.cache import warm
from ragserve.cache.cold_documents import submit_cold
from ragserve.cache.warm import KIND, Warmer, submit_warm
from ragserve.commands import warm as command
from ragserve.config import DEFAULT_MODEL, Settings, load
from ragserve.engine.base import EngineInfo, GenerateRequest
from ragserve.engine.document_cache import Whereabouts
from ragserve.errors import EngineError, InvalidRequest, NotFound, StorageFull, Unavailable
from ragserve.ingest.jobs import lease
from ragserve.ingest.jobs.runner import JobRunner
from ragserve_index import IndexStore, JobStore, NewChunk, NewDocument
from tests.unit.api.scripted_server import eventually

PAGE = 1000


class Cache:
    """Documents by token ids; on disk as soon as they are computed, unless told otherwise."""

    def __init__(self) -> None:
        self.info = EngineInfo(
            "local", "m", DEFAULT_MODEL, "0", "cpu", "none", 600, 4096, ("full", "prefix", "concat")
        )
        self.state: dict[tuple[int, ...], str] = {}
        self.computed: list[list[int]] = []
        self.settles_as = "disk"
        self.poison: list[int] | None = None
        self.budget: int | None = 10**9
        self.faults: dict[str, int] = {}
        self.queued = self.used = 0
        self.groups = 0
        self.hold = threading.Event()
        self.hold.set()
        self.died: Exception | None = None

    async def ready(self) -> bool:
        return self.died is None

    async def warm(self, request: GenerateRequest) -> None:
        self.groups += 1
        if self.died is not None:
            raise self.died
        while not self.hold.is_set():
            await asyncio.sleep(0.005)
        for span in request.spans:
            ids = request.input_ids[span.start : span.end]
            if ids == self.poison:
                raise EngineError("cannot compute this one")
            self.computed.append(ids)
            self.state[tuple(ids)] = self.settles_as

    async def control(self, operation: str) -> dict[str, Any]:
        assert operation == "stat"
        return {"disk": {"bytes": self.used}}

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        below: Any = tuple(self.state.get(tuple(ids), "absent") for ids in documents)
        none = (False,) * len(below)
        return Whereabouts(
            none, none, below, "disk", self.budget, 10**9, self.queued, 16, PAGE, dict(self.faults)
        )


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.load(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(data_dir=tmp_path / "data")


@pytest.fixture
def store(settings: Settings) -> Iterator[IndexStore]:
    with IndexStore(settings.data_dir) as store:
        store.ensure_namespace("n", embedder="e", dim=4)
        store.replace_documents("n", [document(f"d{i}", 3) for i in range(4)])
        yield store


@pytest.fixture
def engine() -> Cache:
    return Cache()


@pytest.fixture
def warmer(
    store: IndexStore, engine: Cache, prompts: PromptBuilder, loop: asyncio.AbstractEventLoop
) -> Warmer:
    return Warmer(store, engine, prompts, loop)


def text(name: str, number: int, words: int = 60) -> str:
    return f"Part {number} of {name}. " + "Rivers run down to the sea. " * (words // 6)


def document(name: str, n_chunks: int, words: int = 60) -> Any:
    chunks = [NewChunk(text(name, i, words), i, i + 1, words) for i in range(n_chunks)]
    return (
        NewDocument(name, name.upper(), name, "text/plain", 9, {}),
        chunks,
        np.eye(1, 4, dtype=np.float32).repeat(n_chunks, 0),
    )


def ids_of(prompts: PromptBuilder, name: str, n: int = 3) -> list[list[int]]:
    return [prompts.document_ids(name.upper(), text(name, i)) for i in range(n)]


def test_every_chunk_and_the_system_text_once_as_queries_have_them(
    warmer: Warmer, store: IndexStore, engine: Cache, prompts: PromptBuilder
) -> None:
    report = warmer.run(submit_warm(store, "n").job_id)
    wanted = [prompts.system_ids(), *(ids for i in range(4) for ids in ids_of(prompts, f"d{i}"))]
    assert sorted(engine.computed) == sorted(wanted)
    built = prompts.build("Why?", [], max_prompt_tokens=500)
    assert built.input_ids != prompts.system_ids(), "the system text is that of prompts with documents"
    assert (report.state, report.progress.warmed, report.progress.chunks, report.failures) == (
        "done",
        4,
        12,
        (),
    )
    assert report.progress.tokens == sum(map(len, wanted[1:]))
    engine.computed.clear()
    again = warmer.run(submit_warm(store, "n", ["d1", store.documents("n")[0].doc_id]).job_id)
    assert (engine.computed, again.progress.unchanged, again.progress.total) == ([], 2, 2)


def test_only_what_is_missing_is_computed(
    warmer: Warmer, store: IndexStore, engine: Cache, prompts: PromptBuilder
) -> None:
    first, second, _ = (tuple(ids) for ids in ids_of(prompts, "d0"))
    engine.state = {first: "disk", second: "remote"}  # another engine has stored it
    engine.state[tuple(ids_of(prompts, "d0")[2])] = "host"  # evicted before it was written: to be had again
    report = warmer.run(submit_warm(store, "n", ["d0"]).job_id)
    assert engine.computed == [prompts.system_ids(), ids_of(prompts, "d0")[2]]
    (item,) = warmer.jobs.items(report.job_id)
    assert (item.state, item.chunks) == ("warmed", 1)


def test_what_cannot_be_warmed_is_an_item_with_its_reason(
    warmer: Warmer, store: IndexStore, engine: Cache, prompts: PromptBuilder
) -> None:
    store.replace_documents("n", [document("long", 1, words=2000)])
    job = submit_warm(store, "n")
    gone = store.find_source("n", "d3")
    assert gone is not None
    store.remove_document("n", gone.doc_id)
    engine.poison = ids_of(prompts, "d1")[1]
    report = warmer.run(job.job_id)
    items = {item.source: (item.state, item.reason or "") for item in warmer.jobs.items(job.job_id)}
    assert (items["d0"][0], items["d2"][0]) == ("warmed", "warmed")
    assert items["d1"] == ("failed", "cannot compute this one")
    assert items["d3"] == ("skipped", "it is no longer indexed")
    assert "the engine takes 592" in items["long"][1]
    assert {source for source, _ in report.failures} == {"d1", "d3", "long"}
    assert report.progress.done == 5


def test_a_full_budget_keeps_what_was_warmed_instead_of_evicting_it(
    warmer: Warmer, store: IndexStore, engine: Cache, prompts: PromptBuilder
) -> None:
    one = sum(-(-len(ids) // 16) * PAGE * 103 // 100 for ids in ids_of(prompts, "d0"))
    engine.budget = 2 * one
    report = warmer.run(submit_warm(store, "n").job_id)
    assert (report.progress.warmed, report.progress.skipped) == (2, 2)
    assert "kv_disk_bytes" in report.failures[0][1]


def test_a_full_disk_ends_the_job_and_says_so(warmer: Warmer, store: IndexStore, engine: Cache) -> None:
    engine.settles_as, engine.faults = "host", {"disk_full": 3}
    job = submit_warm(store, "n")
    before = warmer.run(job.job_id)
    assert "not kept on disk" in before.failures[0][1], "faults of the past are not this job's"
    failing = submit_warm(store, "n")

    async def fill(request: GenerateRequest) -> None:
        engine.faults["disk_full"] += 1

    engine.warm = fill  # type: ignore[method-assign]
    with pytest.raises(StorageFull, match="disk of the document cache is full"):
        warmer.run(failing.job_id)
    ended = warmer.jobs.get(failing.job_id)
    assert (ended.state, ended.counts["pending"]) == ("failed", 4)


def test_writes_are_waited_for_and_a_stuck_disk_is_an_error(
    warmer: Warmer, store: IndexStore, engine: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.settles_as, look = "writing", engine.where
    looks = 0

    async def where(namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        nonlocal looks
        found = await look(namespace, documents)
        if "writing" in found.below:
            looks += 1
            if looks == 3:
                engine.state = dict.fromkeys(engine.state, "disk")
        return found

    monkeypatch.setattr(engine, "where", where)
    assert warmer.run(submit_warm(store, "n").job_id).progress.warmed == 4
    assert looks == 3
    engine.state.clear()
    monkeypatch.setattr(warm, "_STALLED_S", 0.2)
    with pytest.raises(Unavailable, match="Nothing was written"):
        warmer.run(submit_warm(store, "n").job_id)


def test_a_job_whose_engine_dies_is_resumed_by_the_next_server(
    warmer: Warmer, store: IndexStore, engine: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_RETRY_S", 0.0)
    job = submit_warm(store, "n")
    for died in (Unavailable("The engine has died."), EngineError("aborted")):
        engine.died = died
        assert warmer.run(job.job_id).state == "interrupted"
        assert warmer.jobs.get(job.job_id).counts["failed"] == 0
    engine.died = None
    assert warmer.run(job.job_id).progress.warmed == 4


def test_a_job_is_interrupted_resumed_and_cancelled(
    warmer: Warmer, store: IndexStore, engine: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_GROUP_TOKENS", 1)
    leases: list[lease.Lease] = []

    class Noted(lease.Lease):
        def __enter__(self) -> lease.Lease:
            leases.append(self)
            return super().__enter__()

    monkeypatch.setattr(lease, "Lease", Noted)
    job, stop = submit_warm(store, "n"), threading.Event()
    first = warmer.run(
        job.job_id, stop=stop, on_progress=lambda progress: stop.set() if progress.warmed else None
    )
    assert (first.state, warmer.jobs.get(job.job_id).state) == ("interrupted", "running")
    done = warmer.run(job.job_id)
    assert (done.state, done.progress.done) == ("done", 4)
    assert len(engine.computed) == 13, "nothing twice"
    engine.state.clear()
    engine.hold.clear()
    other = submit_warm(store, "n")
    runner = JobRunner(warmer, KIND)
    runner.start()
    eventually(lambda: engine.groups == 14, "the next group")
    warmer.jobs.request_cancel(other.job_id)
    eventually(lambda: leases[-1].cancelled, "the lease's look, once a second")
    engine.hold.set()
    eventually(lambda: warmer.jobs.get(other.job_id).finished, "the end")
    runner.stop()
    assert warmer.jobs.get(other.job_id).state == "cancelled"
    assert len(engine.computed) < 26


def test_an_engine_that_composes_nothing_is_not_warmed(
    warmer: Warmer, store: IndexStore, engine: Cache
) -> None:
    engine.info = replace(engine.info, strategies=("full", "prefix"))
    job = submit_warm(store, "n")
    with pytest.raises(InvalidRequest, match="cannot compose"):
        warmer.run(job.job_id)
    assert "cannot compose" in (warmer.jobs.get(job.job_id).error or "")


def in_background(store: IndexStore) -> str:
    """Queue what an ingestion leaves for the server to warm; the job's id."""
    sources = [f"d{number}" for number in range(4)]
    return JobStore(store).create("n", {"kind": KIND, "background": True}, sources).job_id


def test_a_job_in_the_background_waits_for_queries_and_can_be_stopped_meanwhile(
    store: IndexStore, engine: Cache, prompts: PromptBuilder, loop: asyncio.AbstractEventLoop
) -> None:
    busy, stop = threading.Event(), threading.Event()
    looks = 0

    def answering() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            stop.set()
        return busy.is_set()

    warmer = Warmer(store, engine, prompts, loop, busy=answering)
    busy.set()
    job_id = in_background(store)
    assert warmer.run(job_id, stop=stop).state == "interrupted"
    assert (looks, engine.computed) == (3, []), "looked again and again, and computed nothing"
    assert warm.warming(warmer.jobs.list()) == {"jobs": 1, "documents": 4, "documents_left": 4}
    busy.clear()
    assert warmer.run(job_id).progress.warmed == 4
    assert warm.warming(warmer.jobs.list()) == {"jobs": 0, "documents": 0, "documents_left": 0}
    asked = warmer.run(submit_warm(store, "n").job_id)
    assert (asked.progress.unchanged, looks > 3) == (4, True)


def test_a_slow_engine_computes_a_chunk_at_a_time_in_the_background(
    warmer: Warmer, store: IndexStore, engine: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_BACKGROUND_FIRST_TOKENS", 1)
    monkeypatch.setattr(warm, "_BACKGROUND_S", 0.0)
    warmer.run(in_background(store))
    assert engine.groups == len(engine.computed) == 13
    engine.state.clear()
    warmer.run(submit_warm(store, "n").job_id)
    assert engine.groups == 14, "all at once for who asked"


def test_warming_in_the_background_evicts_nothing(
    warmer: Warmer, store: IndexStore, engine: Cache, prompts: PromptBuilder
) -> None:
    one = sum(-(-len(ids) // 16) * PAGE * 103 // 100 for ids in ids_of(prompts, "d0"))
    engine.budget, engine.used = 3 * one, 2 * one
    report = warmer.run(in_background(store))
    assert (report.progress.warmed, report.progress.skipped) == (1, 3)
    assert "kv_disk_bytes" in report.failures[0][1]


def test_what_is_cached_takes_no_room_a_second_time(
    warmer: Warmer, store: IndexStore, engine: Cache, prompts: PromptBuilder
) -> None:
    documents = [ids_of(prompts, name) for name in ("d0", "d1", "d2")]
    one = sum(-(-len(ids) // 16) * PAGE * 103 // 100 for ids in documents[0])
    engine.state = {tuple(ids): "disk" for each in documents for ids in each}
    engine.budget, engine.used = 5 * one, 3 * one
    report = warmer.run(in_background(store))
    assert (report.progress.unchanged, report.progress.warmed, report.progress.skipped) == (3, 1, 0)


def test_an_engine_that_composes_nothing_fails_no_job_that_nobody_asked_for(
    warmer: Warmer, store: IndexStore, engine: Cache
) -> None:
    engine.info = replace(engine.info, strategies=("full", "prefix"))
    report = warmer.run(in_background(store))
    assert (report.state, report.progress.skipped, engine.computed) == ("done", 4, [])
    assert "cannot compose" in report.failures[0][1]


def test_unknown_documents_and_namespaces(store: IndexStore) -> None:
    with pytest.raises(NotFound):
        submit_warm(store, "elsewhere")
    with pytest.raises(NotFound):
        submit_warm(store, "n", ["d0", "nothing"])
    assert JobStore(store).list() == []


def test_a_command_leaves_the_job_to_the_server_on_the_folder(
    settings: Settings, warmer: Warmer, store: IndexStore
) -> None:
    runner = JobRunner(warmer, KIND)
    seen: list[int] = []
    with serving.shared(settings.data_dir):
        runner.start()
        report = command.run_warm(
            settings,
            store,
            submit_warm(store, "n").job_id,
            stop=threading.Event(),
            on_progress=lambda p: seen.append(p.warmed),
        )
        runner.stop()
    assert (report.state, report.progress.warmed, seen[-1]) == ("done", 4, 4)


def test_a_command_stops_the_servers_job(settings: Settings, store: IndexStore) -> None:
    stop = threading.Event()
    stop.set()
    with serving.shared(settings.data_dir):
        report = command.run_warm(
            settings, store, submit_warm(store, "n").job_id, stop=stop, on_progress=lambda _: None
        )
    assert report.state == "cancelled"


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"engine_url": "http://127.0.0.1:1"}, "remote engine"), ({"kv_disk_bytes": 0}, "not outlive")],
)
def test_settings_with_which_nothing_would_be_left(
    settings: Settings, store: IndexStore, changed: dict[str, Any], says: str
) -> None:
    other = settings.model_copy(update=changed)
    with pytest.raises(InvalidRequest, match=says):
        command.run_warm(
            other, store, submit_warm(store, "n").job_id, stop=threading.Event(), on_progress=lambda _: None
        )
    with pytest.raises(InvalidRequest, match=says):
        command.check_warm(other)
    with pytest.raises(InvalidRequest, match="needs a server"):
        command.check_warm(settings, repeated=True)


def test_what_was_ingested_before_the_start_is_warmed_newest_first_within_the_room(
    warmer: Warmer, store: IndexStore, engine: Cache, prompts: PromptBuilder
) -> None:
    store.ensure_namespace("empty", embedder="e", dim=4)
    store.ensure_namespace("later", embedder="e", dim=4)
    time.sleep(0.01)
    store.replace_documents("later", [document("new", 2)])
    per_document = 3 * (60 + 16)
    assert submit_cold(store, 2 * (60 + 16) + 3 * per_document) == 4
    jobs = {job.namespace: job for job in warmer.jobs.list(state="queued")}
    assert {name: job.n_items for name, job in jobs.items()} == {"later": 1, "n": 3}
    assert all(job.spec["background"] for job in jobs.values())
    assert submit_cold(store, None) == 0, "those go on"
    for job in jobs.values():
        warmer.run(job.job_id)
    assert len(engine.computed) == 1 + 2 + 3 * 3, "the system text, too"
    assert submit_cold(store, None) == 5
    computed = len(engine.computed)
    for job in warmer.jobs.list(state="queued"):
        warmer.run(job.job_id)
    assert len(engine.computed) == computed + 3, "what is cached is not computed again"
