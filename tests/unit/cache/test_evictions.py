"""Removed documents' KV: the server's reader of the log, and the files on disk where no server runs."""

from __future__ import annotations

import asyncio
import gc
import re
import sqlite3
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragserve.answering.in_flight import QueryLimiter
from ragserve.answering.prompt import Prompt, PromptBuilder, Segment
from ragserve.cache import evictions, lock
from ragserve.cache.evictions import Evictor, clean_files, note_engine
from ragserve.config import DEFAULT_MODEL, Settings, load
from ragserve.errors import Conflict, EngineError
from ragserve.metrics import exposition, metrics
from ragserve_index import EvictionLog, IndexStore, NewChunk, NewDocument
from sglang_ext.documents.pages.types import DiskConfig, DocumentMeta, KvShape
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.wire.protocol import document_key

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, block=16)
TEXTS = {
    "otter": "Otters hold hands while they sleep.",
    "heron": "Herons stand still for hours.",
    "vole": "Voles dig.",
}


class Engine:
    """Notes what it is told to forget."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[str, Sequence[Sequence[int]] | None]] = []
        self.error: Exception | None = None

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        if self.error is not None:
            raise self.error
        self.forgotten.append((namespace, documents))


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.load(DEFAULT_MODEL)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(data_dir=tmp_path / "data")


@pytest.fixture
def store(settings: Settings) -> Iterator[IndexStore]:
    with IndexStore(settings.data_dir) as store:
        store.ensure_namespace("birds", embedder="e", dim=4)
        store.replace_documents("birds", [written(name) for name in TEXTS])
        yield store


def written(name: str, text: str | None = None) -> Any:
    text = text or TEXTS[name]
    document = NewDocument(name, name.title(), text, "text/plain", len(text), {})
    return document, [NewChunk(text, 0, len(text), 9)], np.eye(1, 4, dtype=np.float32)


def remove(store: IndexStore, name: str) -> None:
    found = store.find_source("birds", name)
    assert found is not None
    store.remove_document("birds", found.doc_id)


async def until(condition: Any) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_server_acts_at_once_and_on_what_other_processes_remove(
    settings: Settings, store: IndexStore, prompts: PromptBuilder
) -> None:
    engine = Engine()

    async def scenario() -> None:
        remove(store, "otter")  # before the server's start
        evictor = Evictor(store, engine, prompts)  # type: ignore[arg-type]
        async with evictor.running():
            assert engine.forgotten == [("birds", [prompts.document_ids("Otter", TEXTS["otter"])])]
            store.replace_documents("birds", [written("heron", "Herons eat fish.")])
            await evictor.drain()
            assert engine.forgotten[1:] == [("birds", [prompts.document_ids("Heron", TEXTS["heron"])])]
            code = (
                "import sys; from pathlib import Path; from ragserve_index import IndexStore\n"
                "with IndexStore(Path(sys.argv[1])) as store: store.drop_namespace('birds')"
            )
            index = weakref.ref(store.faiss_index("birds"))
            other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(settings.data_dir))
            assert await other.wait() == 0
            await until(lambda: engine.forgotten[2:] == [("birds", None)])
            gc.collect()
            assert index() is None, "its vectors are not kept either"

    asyncio.run(scenario())
    assert len(EvictionLog(store.database)) == 1, "kept for other servers and for queries under way"


def test_what_else_goes_with_a_namespace_goes_before_its_kv(
    store: IndexStore, prompts: PromptBuilder
) -> None:
    """Other processes drop namespaces, and know nothing of this server's data folder."""
    engine, forgotten = Engine(), list[tuple[Set[str], int]]()

    async def scenario() -> None:
        def note(names: Set[str]) -> None:
            forgotten.append((names, len(engine.forgotten)))

        evictor = Evictor(store, engine, prompts, dropped=note)  # type: ignore[arg-type]
        async with evictor.running():
            remove(store, "otter")
            await evictor.drain()
            assert not forgotten, "the namespace is there"
            with IndexStore(store.data_dir) as other:
                other.drop_namespace("birds")
            await until(lambda: len(engine.forgotten) == 2)
            assert forgotten == [({"birds"}, 1)]

    asyncio.run(scenario())


def test_a_failure_of_what_else_goes_keeps_no_kv(store: IndexStore, prompts: PromptBuilder) -> None:
    engine = Engine()

    def fail(_: Set[str]) -> None:
        raise OSError("no such device")

    async def scenario() -> None:
        async with Evictor(store, engine, prompts, dropped=fail).running():  # type: ignore[arg-type]
            with IndexStore(store.data_dir) as other:
                other.drop_namespace("birds")
            await until(lambda: bool(engine.forgotten))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error", [EngineError("busy"), KeyError("tokens"), sqlite3.OperationalError("locked")]
)
def test_an_engine_that_fails_is_asked_again(
    store: IndexStore, prompts: PromptBuilder, error: Exception
) -> None:
    """Whatever the failure is: the reader must not end and leave later removals unseen."""
    engine = Engine()

    async def scenario() -> None:
        async with Evictor(store, engine, prompts).running():  # type: ignore[arg-type]
            engine.error = error
            remove(store, "vole")
            await asyncio.sleep(2 * evictions.POLL_S)
            assert engine.forgotten == []
            engine.error = None
            await until(lambda: engine.forgotten)

    asyncio.run(scenario())


def test_a_registry_that_cannot_be_read_for_once_is_looked_at_again(
    store: IndexStore, prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One I/O error ended the reader, and removals by other processes were never seen again."""
    engine, marks, mark = Engine(), [0], EvictionLog.mark

    def failing(log: EvictionLog) -> int | None:
        marks[0] += 1
        if marks[0] == 1:
            raise OSError("I/O error")
        return mark(log)

    async def scenario() -> None:
        async with Evictor(store, engine, prompts).running():  # type: ignore[arg-type]
            monkeypatch.setattr(EvictionLog, "mark", failing)
            await until(lambda: marks[0])
            with IndexStore(store.data_dir) as other:
                remove(other, "vole")
            await until(lambda: engine.forgotten)

    asyncio.run(scenario())


def test_series_of_a_removed_namespace_go(store: IndexStore, prompts: PromptBuilder) -> None:
    """Whichever process removes it."""
    recorded = metrics()
    for namespace in ("birds", "boats"):
        for gauge in (
            recorded.use_compared,
            recorded.use_different,
            recorded.use_recorded,
            recorded.use_unsupported,
            recorded.use_taken_out,
            recorded.use_dropped,
        ):
            gauge.labels(namespace, "epic:first=8").set(1)
    engine = Engine()

    def shown() -> set[str]:
        text = exposition()[0].decode()
        return set(re.findall(r'ragserve_use_\w+\{namespace="(birds|boats)"', text))

    async def scenario() -> None:
        async with Evictor(store, engine, prompts).running():  # type: ignore[arg-type]
            assert shown() == {"birds", "boats"}
            store.drop_namespace("birds")
            await until(lambda: ("birds", None) in engine.forgotten)

    asyncio.run(scenario())
    assert shown() == {"boats"}
    metrics().forget_namespace("boats")


def test_a_query_that_began_before_a_removal_is_waited_for(
    store: IndexStore, prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold the removed text, and cache its KV, however long it waits in the engine's queue."""
    monkeypatch.setattr(evictions, "GRACE_S", 0.2)
    engine, limiter = Engine(), QueryLimiter(4)

    async def scenario() -> None:
        async with Evictor(store, engine, prompts, limiter.queries).running():  # type: ignore[arg-type]
            with limiter.slot():
                remove(store, "vole")
                with limiter.slot():  # a later query cannot have retrieved it
                    await until(lambda: engine.forgotten)
                await asyncio.sleep(1)  # five times the grace
                assert len(engine.forgotten) == 1
                assert len(EvictionLog(store.database)) == 1
            await until(lambda: len(engine.forgotten) >= 2)
            await until(lambda: len(EvictionLog(store.database)) == 0)

    asyncio.run(scenario())


def laid_out(*documents: list[int]) -> Prompt:
    ids, segments = [0], [Segment("system", 0, 1)]
    for document in documents:
        segments.append(Segment("document", len(ids), len(ids) + len(document)))
        ids += document
    return Prompt([*ids, 0], (*segments, Segment("question", len(ids), len(ids) + 1)), len(documents), 0, 0)


@pytest.mark.parametrize("asked", ["birds", "apes+birds"])
def test_a_namespace_made_anew_keeps_its_kv_but_none_of_queries_of_before(
    store: IndexStore, prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Such a query caches the KV of removed texts when all of the namespace has been evicted already. It may
    be about several."""
    monkeypatch.setattr(evictions, "GRACE_S", 0.4)
    engine, limiter = Engine(), QueryLimiter(4)

    async def scenario() -> None:
        async with Evictor(store, engine, prompts, limiter.queries).running():  # type: ignore[arg-type]
            with limiter.slot(asked) as before, limiter.slot("fish") as other:
                store.drop_namespace("birds")
                await until(lambda: engine.forgotten)
                assert engine.forgotten == [("birds", None)]
                store.ensure_namespace("birds", embedder="e", dim=4)
                store.replace_documents("birds", [written("vole")])
                before.prompt = laid_out([1, 2], [3])  # retrieved before the drop, laid out after it
                other.prompt = laid_out([4])
                with limiter.slot("birds") as later:
                    later.prompt = laid_out([5])
            await until(lambda: len(EvictionLog(store.database)) == 0)

    asyncio.run(scenario())
    assert {str(each) for each in engine.forgotten[1:]} == {str(("birds", [[1, 2], [3]]))}


def test_rows_are_acted_on_again_after_their_grace_and_then_go(
    store: IndexStore, prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictions, "GRACE_S", 0.4)
    engine = Engine()

    async def scenario() -> None:
        async with Evictor(store, engine, prompts).running():  # type: ignore[arg-type]
            remove(store, "vole")
            await until(lambda: len(engine.forgotten) >= 2)
            await until(lambda: len(EvictionLog(store.database)) == 0)

    asyncio.run(scenario())
    assert set(map(str, engine.forgotten)) == {str(("birds", [prompts.document_ids("Vole", TEXTS["vole"])]))}


def cache(settings: Settings, prompts: PromptBuilder) -> dict[str, Path]:
    """Files of all texts, as a server leaves them."""
    folder = settings.data_dir / "kv"
    store = TierStore(
        SHAPE, fingerprint="f" * 16, host_bytes=2**20, disk=DiskConfig(folder, budget_bytes=2**24), pin=False
    )
    keys = {}
    for name, text in TEXTS.items():
        ids = prompts.document_ids(name.title(), text)
        keys[name] = document_key("birds", "f" * 16, ids)
        k, v = torch.randn(2, 2, len(ids), 2, 8)
        store.put(DocumentMeta(keys[name], "birds", ids, len(ids), "f" * 16), k, v)
    assert store.flush(240)
    store.close()
    return {name: next(folder.rglob(f"{key}.pages")) for name, key in keys.items()}


def test_without_a_server_the_files_go(settings: Settings, store: IndexStore, prompts: PromptBuilder) -> None:
    files = cache(settings, prompts)
    note_engine(settings, DEFAULT_MODEL)
    remove(store, "otter")
    store.replace_documents("birds", [written("heron", "Herons eat fish.")])
    elsewhere = settings.model_copy(update={"model": "/a/model/that/this/command/does/not/know"})
    assert clean_files(elsewhere, store)
    assert [name for name, path in files.items() if path.exists()] == ["vole"]
    assert len(EvictionLog(store.database)) == 0
    store.drop_namespace("birds")
    assert clean_files(elsewhere, store)
    assert not any(path.exists() for path in files.values())


def test_a_running_server_keeps_the_log_to_itself(
    settings: Settings, store: IndexStore, prompts: PromptBuilder
) -> None:
    files = cache(settings, prompts)
    remove(store, "otter")
    with lock.shared(settings.data_dir), lock.shared(settings.data_dir):  # two servers may share a folder
        assert not clean_files(settings, store)
    assert files["otter"].exists()
    assert len(EvictionLog(store.database)) == 1
    assert clean_files(settings, store)
    assert not files["otter"].exists()


def test_without_any_cache_nothing_is_kept_or_loaded(
    settings: Settings, store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptBuilder, "load", lambda *_: pytest.fail("a tokenizer takes a second to load"))
    remove(store, "otter")
    assert clean_files(settings, store)
    assert len(EvictionLog(store.database)) == 0


def test_what_only_a_server_can_remove_is_left_to_it(
    settings: Settings, store: IndexStore, prompts: PromptBuilder
) -> None:
    cache(settings, prompts)
    note_engine(settings.model_copy(update={"kv_storage": "mooncake"}), DEFAULT_MODEL)
    remove(store, "otter")
    assert not clean_files(settings, store)
    note_engine(settings, "/no/tokenizer/here")
    (settings.data_dir / "kv" / "engine.json").write_text(
        '{"storage": "file", "tokenizers": ["/no/tokenizer/here"]}'
    )
    assert not clean_files(settings, store)
    assert len(EvictionLog(store.database)) == 1


def test_the_lock_goes_with_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WAIT_S", 0.1)
    code = (
        "import sys, time; from pathlib import Path; from ragserve.cache import lock\n"
        "with lock.alone(Path(sys.argv[1])) as alone: print(alone, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"True\n"
    with pytest.raises(Conflict, match="to itself"), lock.shared(tmp_path):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with lock.alone(tmp_path, wait_s=60) as free:
        assert free
