"""Threads and processes at once on one data directory: every search is of one committed version, and of the
newest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from ragserve.errors import NotFound, Unavailable
from ragserve_index import Eq, IndexStore, search
from ragserve_index.locks import ReadWriteLock
from ragserve_index.postgres import postgres_database
from ragserve_index.sqlite import sqlite_database
from ragserve_index.structures.base import IdSelection
from ragserve_index.structures.flat import Sq8
from ragserve_index.structures.hnsw import Hnsw
from ragserve_index.structures.ivf import Ivf
from tests.conftest import EXHAUSTIVE
from tests.unit.index.index_samples import (
    TYPES,
    all_chunks,
    assert_clean,
    fill,
    item,
    make,
    on_both_registries,
    on_registries,
    on_sqlite,
    open_store,
    texts,
    vectors_of,
)

DOCUMENTS, CHUNKS = 6, 10
EDITIONS, SEARCHERS = (40, 4) if EXHAUSTIVE else (16, 3)  # written while so many threads search
pytestmark = on_registries


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def write_edition(store: IndexStore, edition: int) -> int:
    """All documents of one edition in one batch; the version it made."""
    batch = [item(f"d{i}", CHUNKS, edition=edition, metadata={"even": i % 2 == 0}) for i in range(DOCUMENTS)]
    store.replace_documents("n", batch)
    return store.namespace("n").version


@pytest.mark.parametrize(
    ("registry", "index_type"),
    [*(("sqlite", t) for t in TYPES), ("postgres", "flat")],
    indirect=["registry"],
)
def test_searches_see_one_version_while_another_thread_writes(
    tmp_path: Path, index_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sq8, "TRAIN_FROM", 30)
    monkeypatch.setattr(Ivf, "TRAIN_FROM", 30)
    done = Event()
    failures: list[str] = []
    with make(tmp_path, index_type) as store:
        write_edition(store, 0)

        def search(number: int) -> int:
            last = n = 0
            node = Eq(field="even", value=True) if number % 2 else None
            while not done.is_set():
                committed = store.namespace("n").version
                result = store.search("n", vectors_of("q", n=1 + number % 2), 1000, filter=node)
                for hits in result.hits:
                    found = [hit.chunk.text for hit in hits]
                    editions = {text.split("#")[1].split(".")[0] for text in found}
                    expected = DOCUMENTS * CHUNKS // (2 if node else 1)
                    if len(editions) != 1 or len(set(found)) != len(found) or len(found) != expected:
                        failures.append(f"{len(found)} hits of editions {editions}")
                    elif int(next(iter(editions))) != result.version - 1:
                        failures.append(f"edition {editions} at version {result.version}")
                if result.version < max(last, committed):
                    failures.append(
                        f"version {result.version} after {committed} was committed and {last} seen"
                    )
                last = result.version
                n += 1
            return n

        with ThreadPoolExecutor(SEARCHERS) as threads:
            searches = [threads.submit(search, i) for i in range(SEARCHERS)]
            for edition in range(1, EDITIONS):
                write_edition(store, edition)
                if edition % (EDITIONS // 3) == 0:
                    store.save()
                if edition == EDITIONS // 2:
                    store.rebuild("n")
            done.set()
            assert all(future.result() > 0 for future in searches)
        assert not failures, failures[:3]
        assert_clean(store)


@on_sqlite
def test_searches_go_on_while_the_type_changes(tmp_path: Path) -> None:
    done = Event()
    with make(tmp_path) as store:
        fill(store, 150)

        def search() -> set[tuple[str, ...]]:
            seen = set()
            while not done.is_set():
                seen.add(tuple(texts(store, vectors_of("d3", 0, n=10)[3], 1)))
            return seen

        with ThreadPoolExecutor(2) as threads:
            searches = [threads.submit(search) for _ in range(2)]
            for index_type in ("hnsw", "flat", "sq8", "hnsw"):
                store.rebuild("n", index_type=index_type)
            done.set()
            assert {result for future in searches for result in future.result()} == {("d3#0.3",)}


@on_both_registries
def test_two_stores_see_each_other_at_once(tmp_path: Path) -> None:
    """Two stores stand for separate processes, without their start: they share nothing but the directory."""
    with make(tmp_path) as one, open_store(tmp_path) as two:
        for edition in range(10):
            writer, reader = (one, two) if edition % 2 else (two, one)
            version = write_edition(writer, edition)
            result = reader.search("n", vectors_of("q"), 1000)
            assert result.version == version
            assert {hit.chunk.text.split("#")[1].split(".")[0] for hit in result.hits[0]} == {str(edition)}
        one.drop_namespace("n")
        with pytest.raises(NotFound):
            two.search("n", vectors_of("q"), 1)
        one.ensure_namespace("n", embedder="e", dim=16)
        assert two.search("n", vectors_of("q"), 1).hits == [[]]


_WRITER = """
import sys
from pathlib import Path
from tests.unit.index.index_samples import item, open_store
with open_store(Path(sys.argv[1])) as store:
    for line in sys.stdin:
        store.replace_documents("n", [item(f"d{i}", 10, edition=int(line)) for i in range(6)])
        print(store.namespace("n").version, flush=True)
"""


@on_both_registries
def test_another_process_writes(tmp_path: Path) -> None:
    with make(tmp_path, "hnsw") as store:
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            for edition in range(12):
                process.stdin.write(f"{edition}\n")
                process.stdin.flush()
                version = int(process.stdout.readline())
                result = store.search("n", vectors_of("q"), 1000)
                assert result.version == version
                assert {hit.chunk.text.split("#")[1].split(".")[0] for hit in result.hits[0]} == {
                    str(edition)
                }
            process.stdin.close()
        assert process.returncode == 0
        assert_clean(store)


@on_both_registries
def test_many_threads_write(tmp_path: Path) -> None:
    with make(tmp_path) as store, open_store(tmp_path) as other:

        def write(number: int) -> None:
            for edition in range(8):
                (store, other)[number % 2].replace_documents("n", [item(f"t{number}", 3, edition=edition)])

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(write, range(6)))
        info = store.namespace("n")
        assert (info.version, info.n_documents, info.n_chunks) == (48, 6, 18)
        assert sorted(texts(other, vectors_of("q"), 100)) == sorted(
            f"t{n}#7.{i}" for n in range(6) for i in range(3)
        )
        assert len(all_chunks(store)) == 18
        assert_clean(store)
        assert_clean(other)


@on_sqlite
def test_a_graph_search_needs_no_lock_against_other_searches() -> None:
    """FAISS searches of one index may run at once; each has its own parameters, whose selector IndexIDMap
    rewrites.
    """
    vectors = vectors_of("x", n=3_000)
    graph = Hnsw.empty(16)
    ids = np.arange(1, 3_001)
    graph.add(ids, vectors)
    selections = [IdSelection(ids[i::3]) for i in range(3)]

    def search(number: int) -> bool:
        selection = selections[number % 3]
        _, found = graph.search(vectors_of("q", number), 10, selection)
        return bool(((found - 1) % 3 == number % 3).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(search, range(300)))


@on_sqlite
def test_a_waiting_writer_is_not_starved() -> None:
    lock = ReadWriteLock()
    stop, wrote = Event(), Event()

    def read() -> None:
        while not stop.is_set():
            with lock.reading():
                pass

    def write() -> None:
        for _ in range(50):
            with lock.writing():
                pass
        wrote.set()

    readers = [Thread(target=read) for _ in range(3)]
    for thread in [*readers, Thread(target=write)]:
        thread.start()
    assert wrote.wait(240)
    stop.set()
    for thread in readers:
        thread.join()


_DIES = """
import os, signal, sys
from pathlib import Path
from tests.unit.index.index_samples import item, open_store

store, real, calls = open_store(Path(sys.argv[1])), os.pwrite, []

def pwrite(descriptor, data, offset):
    calls.append(data)
    if len(calls) == 2:  # the first announces the commit, the second would say that it is done
        os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, data, offset)

os.pwrite = pwrite
store.replace_documents("n", [item(f"d{i}", 10, edition=1) for i in range(6)])
"""


@on_sqlite
def test_a_writer_killed_before_it_could_say_so(tmp_path: Path) -> None:
    """Killed between its commit and setting the commit mark: who is searching sees the commit all the same,
    and the next ones.
    """
    with make(tmp_path) as reader:
        write_edition(reader, 0)
        reader.search("n", vectors_of("q"), 10)
        done = subprocess.run([sys.executable, "-c", _DIES, str(tmp_path)], env=environment(), timeout=240)
        assert done.returncode == -signal.SIGKILL
        for edition in (1, 2, 3):
            result = reader.search("n", vectors_of("q"), 1000)
            assert {hit.chunk.text.split("#")[1].split(".")[0] for hit in result.hits[0]} == {str(edition)}
            with open_store(tmp_path) as other:
                write_edition(other, edition + 1)


@on_sqlite
def test_a_commit_mark_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry is asked again after a quarter of a second at the latest, whatever the mark says."""
    monkeypatch.setattr(search, "RECHECK_S", 0.0)
    with make(tmp_path) as reader:
        write_edition(reader, 0)
        reader.search("n", vectors_of("q"), 10)
        (tmp_path / "ragserve.commits").unlink()
        with open_store(tmp_path) as writer:
            version = write_edition(writer, 1)
        assert reader.search("n", vectors_of("q"), 10).version == version


@on_both_registries
def test_a_process_that_hangs_in_a_write_is_not_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sqlite_database, postgres_database):
        monkeypatch.setattr(module, "BUSY_TIMEOUT_S", 0.05)
    with make(tmp_path) as store, open_store(tmp_path) as other:
        with store.database.write(), pytest.raises(Unavailable, match="locked for") as caught:
            write_edition(other, 0)
        assert caught.value.code == "registry_busy"
        assert write_edition(other, 1) == 1
