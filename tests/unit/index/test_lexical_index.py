"""The index of a large namespace by tantivy: it finds what the registry's own lexical index finds, at the
same version, or nothing.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve_index import Eq, IndexStore, lexical_indexes, lexical_search, registry
from ragserve_index.lexical_index import LexicalIndex, folder_of
from ragserve_index.lexical_indexes import LexicalIndexes
from ragserve_index.lexical_search import Scored, WordCounts
from ragserve_index.structures.base import IdSelection
from tests.unit.index.index_samples import make, on_both_registries, on_registries, on_sqlite, open_store
from tests.unit.index.test_lexical import corpus, found, write

pytestmark = on_registries
K1, B = 1.2, 0.75


@pytest.fixture(autouse=True)
def _every_namespace_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexical_indexes, "FROM", 1)
    monkeypatch.setattr(lexical_indexes, "_WAIT_S", 240.0)  # a search that comes first may take long


@pytest.fixture
def indexes(store: IndexStore) -> Iterator[LexicalIndexes]:
    """Indexes beside those of the store, which does not search by words here."""
    with_words = LexicalIndexes(store.database, store.data_dir / "indexes")
    yield with_words
    with_words.close()


def ours(
    store: IndexStore, indexes: LexicalIndexes, text: str, k: int = 1000, ids: Sequence[int] | None = None
) -> Scored | None:
    selection = None if ids is None else IdSelection(np.array(sorted(ids), dtype=np.int64))
    with store.database.read() as connection:
        return indexes.search(connection, registry.namespace(connection, "n"), text, k, selection)


def in_registry(store: IndexStore, text: str) -> set[int]:
    """The chunks that share a word with the text, by FTS5 or Postgres."""
    with store.database.read() as connection:
        ns = registry.namespace(connection, "n")
        return {chunk for chunk, _ in lexical_search.search(connection, ns, text, 1000, None, WordCounts())}


def built(store: IndexStore, indexes: LexicalIndexes, text: str = "lamp") -> Scored:
    """Search until the background has built the index."""
    deadline = time.monotonic() + 240
    while (result := ours(store, indexes, text)) is None:
        assert time.monotonic() < deadline, "never built"
        time.sleep(0.005)
    return result


def settle(store: IndexStore, indexes: LexicalIndexes) -> None:
    """Wait until the index is built, and the background has let go of it."""
    built(store, indexes)
    with store.database.read() as connection:
        ns = registry.namespace(connection, "n")
    indexes.bring_up(ns)


def bm25(texts: dict[int, list[str]], words: Sequence[str]) -> dict[int, float]:
    """Scores by the formula; tantivy counts the document with the version, too."""
    total = len(texts) + 1
    average = sum(map(len, texts.values())) / total
    held = Counter(word for text in texts.values() for word in set(text))
    scores: dict[int, float] = {}
    for chunk, text in texts.items():
        for word in set(words) & set(text):
            idf = math.log(1 + (total - held[word] + 0.5) / (held[word] + 0.5))
            tf = text.count(word)
            norm = K1 * (1 - B + B * len(text) / average)
            scores[chunk] = scores.get(chunk, 0.0) + idf * tf * (1 + K1) / (tf + norm)
    return scores


def test_scores_are_those_of_bm25(store: IndexStore, indexes: LexicalIndexes) -> None:
    named = corpus(300)
    write(store, named)
    settle(store, indexes)
    documents = store.documents("n", limit=1000)
    chunks = [store.document_chunks("n", document.doc_id)[0] for document in documents]
    texts = {chunk.chunk_id: chunk.text.split() for chunk in chunks}
    held = Counter(word for text in texts.values() for word in set(text))
    chance = random.Random(1)
    for _ in range(20):
        words = chance.sample(sorted(held), 4)
        telling = [word for word in words if 2 * held[word] < len(texts) + 1]
        expected = bm25(texts, telling)
        k = min(5, len(expected))
        got = ours(store, indexes, " ".join(words), k)
        assert got is not None
        assert [score for _, score in got] == pytest.approx(
            sorted(expected.values(), reverse=True)[:k], rel=1e-4
        )
        assert all(score == pytest.approx(expected[chunk], rel=1e-4) for chunk, score in got)


def test_it_follows_the_documents(store: IndexStore, indexes: LexicalIndexes) -> None:
    chance = random.Random(2)
    write(store, corpus(60))
    settle(store, indexes)
    for step in range(12):
        names = [f"d{i}" for i in chance.sample(range(80), 5)]
        write(store, {name: f"w1 w2 edition{step} {name}" for name in names[:3]})
        for document in store.documents("n", source_prefix=names[3], limit=2):
            store.remove_document("n", document.doc_id)
        for text in ("w1", f"edition{step}", f"edition{step - 1} w3", names[3], "nowhere"):
            now = ours(store, indexes, text)
            assert now is not None, "a small change is taken in by the search"
            assert {chunk for chunk, _ in now} == in_registry(store, text)
    assert store.check()[0].problems == ()


def test_a_search_takes_in_a_change_beside_work_in_the_background(
    store: IndexStore, indexes: LexicalIndexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up, released = indexes.bring_up, threading.Event()

    def bring_up_and_linger(ns: registry.Namespace) -> LexicalIndex:
        index = bring_up(ns)
        assert released.wait(240)
        return index

    monkeypatch.setattr(indexes, "bring_up", bring_up_and_linger)
    try:
        write(store, corpus(40))
        built(store, indexes)
        write(store, {"d1": "later w1"})
        now = built(store, indexes, "later")
        assert {chunk for chunk, _ in now} == in_registry(store, "later") != set()
    finally:
        released.set()


def test_it_follows_when_the_change_log_is_gone(store: IndexStore, indexes: LexicalIndexes) -> None:
    write(store, corpus(40))
    settle(store, indexes)
    write(store, {"d1": "later w1", "d2": "later w2"})
    store.remove_document("n", store.documents("n", source_prefix="d3", limit=1)[0].doc_id)
    store.save("n")  # of the vector index, which prunes the log
    for text in ("later", "w1", "w2"):
        assert {chunk for chunk, _ in ours(store, indexes, text) or []} == in_registry(store, text)


def test_a_closed_index_is_up_to_date(store: IndexStore) -> None:
    write(store, corpus(40))
    first = LexicalIndexes(store.database, store.data_dir / "indexes")
    built(store, first)
    write(store, {"d1": "later w1"})
    first.close()
    store.save("n")
    second = LexicalIndexes(store.database, store.data_dir / "indexes")
    assert len(ours(store, second, "later") or []) == 1, "at once"
    second.close()


@on_both_registries
def test_words_are_cut_as_in_the_registry(store: IndexStore, indexes: LexicalIndexes) -> None:
    write(store, {"cafe": "Ein na\u00efves Caf\u00e9, lamps", "other": "tea", "nfd": "Cafe\u0301 NOT"})
    settle(store, indexes)
    for text in (
        "CAFE",
        "Caf\u00e9",
        "naive",
        "lamp",
        "lighting LAMP",
        "NOT",
        '"*^(',
        "\ud800 tea",
        "",
        "\0",
    ):
        assert {chunk for chunk, _ in ours(store, indexes, text) or []} == in_registry(store, text), text


@pytest.mark.parametrize("every", [2, 100, 1000], ids=["many", "some", "few"])
def test_filters(store: IndexStore, indexes: LexicalIndexes, every: int) -> None:
    write(store, {f"d{i}": "lamp " * (1 + i % 7) + f"w{i % 5}" for i in range(1200)})
    everything = [chunk for chunk, _ in built(store, indexes)]
    ids = everything[::every]
    for k in (1, 3, 1000):
        got = ours(store, indexes, "w1 w2", k, ids)
        assert got is not None
        assert {chunk for chunk, _ in got} <= set(ids) & in_registry(store, "w1 w2")
        assert len(got) == min(k, len(set(ids) & in_registry(store, "w1 w2")))
    assert ours(store, indexes, "lamp", 3, []) == []


def test_an_index_is_found_again_and_shared(store: IndexStore, indexes: LexicalIndexes) -> None:
    write(store, corpus(30))
    expected = built(store, indexes, "w1")
    other = LexicalIndexes(store.database, store.data_dir / "indexes")
    assert ours(store, other, "w1") == expected, "at once: nothing is built"
    write(store, {"new": "w1 w9999"})
    assert ours(store, other, "w9999") is None, "one process writes it, the registry answers here"
    assert len(ours(store, indexes, "w9999") or []) == 1
    assert len(ours(store, other, "w9999") or []) == 1
    indexes.close()
    write(store, {"newer": "w1 w9999"})
    assert len(ours(store, other, "w9999") or []) == 2, "now this one does"
    other.close()


@pytest.mark.parametrize("suffix", [".idx", ".term", ".fast", "meta.json"])
def test_a_damaged_index_is_built_again(
    store: IndexStore, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, corpus(30))
    first = LexicalIndexes(store.database, store.data_dir / "indexes")
    expected = built(store, first, "w1")
    first.close()
    file = next(folder_of(store.data_dir / "indexes", 1).glob(f"*{suffix}"))
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)
    second = LexicalIndexes(store.database, store.data_dir / "indexes")
    assert ours(store, second, "w1") is None
    assert "is built again" in caplog.text
    assert built(store, second, "w1") == expected
    second.close()


@on_sqlite
def test_an_index_of_another_registry_is_not_used(store: IndexStore, tmp_path: Path) -> None:
    write(store, {"a": "lamp", "b": "oil"})
    store.close()
    shutil.copytree(store.data_dir, tmp_path / "backup")
    for data_dir, text in ((store.data_dir, "lamp later"), (tmp_path / "backup", "lamp otherwise")):
        with IndexStore(data_dir) as opened:
            write(opened, {"c": text})
            if data_dir == store.data_dir:
                indexes = LexicalIndexes(opened.database, data_dir / "indexes")
                assert len(built(opened, indexes)) == 2
                indexes.close()
    shutil.rmtree(folder_of(tmp_path / "backup" / "indexes", 1), ignore_errors=True)
    shutil.copytree(folder_of(store.data_dir / "indexes", 1), folder_of(tmp_path / "backup" / "indexes", 1))
    with IndexStore(tmp_path / "backup") as restored:
        indexes = LexicalIndexes(restored.database, tmp_path / "backup" / "indexes")
        assert ours(restored, indexes, "later") is None
        assert built(restored, indexes, "later") == []
        assert len(ours(restored, indexes, "otherwise") or []) == 1
        indexes.close()


def test_an_index_that_lacks_a_file_is_built_again(store: IndexStore) -> None:
    write(store, corpus(30))
    first = LexicalIndexes(store.database, store.data_dir / "indexes")
    expected = built(store, first, "w1")
    first.close()
    folder = folder_of(store.data_dir / "indexes", 1)
    for suffix in sorted({path.suffix for path in folder.glob("[0-9a-f]*.*")}):
        for path in folder.glob(f"[0-9a-f]*{suffix}"):
            path.unlink()
        indexes = LexicalIndexes(store.database, store.data_dir / "indexes")
        assert built(store, indexes, "w1") == expected, suffix
        indexes.close()


def test_a_killed_writer_leaves_an_index_that_is_caught_up_with(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with make(data_dir) as store:
        write(store, corpus(50))
        indexes = LexicalIndexes(store.database, data_dir / "indexes")
        settle(store, indexes)
        indexes.close()
    chance = random.Random(3)
    for _ in range(4):
        edited, says = os.pipe()
        child = os.fork()
        if not child:
            try:
                _edit_forever(data_dir, chance.random(), says)
            finally:
                os._exit(1)
        os.close(says)
        with open(edited, "rb") as words:
            assert words.read(1), "it ended on its own"
            time.sleep(chance.uniform(0, 0.3))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        with open_store(data_dir) as store:
            indexes = LexicalIndexes(store.database, data_dir / "indexes")
            for text in ("w1", "edited", "w2 w3"):
                assert {chunk for chunk, _ in built(store, indexes, text)} == in_registry(store, text)
            assert store.check()[0].problems == ()
            indexes.close()


def _edit_forever(data_dir: Path, seed: float, says: int) -> None:
    chance = random.Random(seed)
    store = open_store(data_dir)
    indexes = LexicalIndexes(store.database, data_dir / "indexes")
    while True:
        write(store, {f"d{chance.randrange(60)}": f"edited w{chance.randrange(9)}" for _ in range(3)})
        ours(store, indexes, "edited")
        os.write(says, b".")


def test_a_store_searches_by_it(store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, {f"d{i}": f"lamp number{i}" for i in range(20)}, lang="en")
    write(store, {"last": "lamp oil"}, lang="de")
    folder = folder_of(store.data_dir / "indexes", 1)
    assert len(found(store, "lamp", 100)) == 21, "the registry answers while it is built"
    deadline = time.monotonic() + 240
    background = store._lexical._background
    while not (folder / "meta.json").exists() or store.check()[0].problems or background.works_on(1):
        assert time.monotonic() < deadline, "never built"
        time.sleep(0.005)
    monkeypatch.setattr(lexical_search, "search", None)  # the registry is not asked any more
    assert found(store, "number7 oil") == ["d7", "last"] or found(store, "number7 oil") == ["last", "d7"]
    assert found(store, "lamp", 3, filter=Eq(field="lang", value="de")) == ["last"]
    write(store, {"d7": "changed"})
    assert found(store, "number7") == []
    assert found(store, "changed") == ["d7"]
    store.drop_namespace("n")
    assert not folder.exists()


def test_folders_of_dropped_namespaces_are_removed(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        left = folder_of(store.data_dir / "indexes", 7)
    left.mkdir()
    (left / "meta.json").write_text("{}")
    with open_store(tmp_path):
        assert not left.exists()


def test_a_long_comparison_is_left_to_the_background(
    store: IndexStore, indexes: LexicalIndexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, corpus(40))
    settle(store, indexes)
    monkeypatch.setattr(lexical_indexes, "COMPARED", 10)
    write(store, {"d1": "later w1"})
    store.save("n")  # of the vector index, which prunes the log
    threads = []
    real = LexicalIndex.follow

    def follow(index: LexicalIndex, *arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        real(index, *arguments)

    monkeypatch.setattr(LexicalIndex, "follow", follow)
    assert len(built(store, indexes, "later")) == 1
    assert threads
    assert all(name.startswith("ragserve-lexical") for name in threads)
