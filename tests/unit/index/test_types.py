"""The four index types: recall, removal, growth into their own structure, change of type, and
loading again.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from ragserve.errors import InvalidRequest
from ragserve_index import IndexStore, Range, structures
from ragserve_index.structures.base import IdSelection
from ragserve_index.structures.flat import Sq8
from ragserve_index.structures.hnsw import Hnsw
from ragserve_index.structures.ivf import Ivf
from tests.conftest import EXHAUSTIVE
from tests.unit.index.index_samples import (
    TYPES,
    all_chunks,
    assert_clean,
    exact,
    fill,
    item,
    make,
    overlap,
    texts,
    vectors_of,
)

# Documents of ten chunks: what each type needs to take its own form. Only exhaustive runs use enough for the
# real threshold of ivf.
SIZE = {"flat": 600, "sq8": 600, "ivf": 2600, "hnsw": 600} if EXHAUSTIVE else dict.fromkeys(TYPES, 150)
# on uniform random vectors, the worst case for lists
RECALL = {"flat": 1.0, "sq8": 0.9, "ivf": 0.7, "hnsw": 0.95}


@pytest.fixture(autouse=True)
def _low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    if not EXHAUSTIVE:
        monkeypatch.setattr(Ivf, "TRAIN_FROM", 1_200)


def recall(store: IndexStore, n_queries: int = 30) -> float:
    known = all_chunks(store)
    queries = vectors_of("recall", n=n_queries)
    _, ids, _ = store.search_ids("n", queries, 10)
    return overlap(ids, exact(np.stack(list(known.values())), list(known), queries, 10)[1])


@pytest.mark.parametrize("index_type", TYPES)
def test_recall_before_and_after_removals_and_reopening(
    tmp_path: Path, index_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    n = SIZE[index_type]
    with make(tmp_path, index_type) as store:
        fill(store, n)
        assert recall(store) >= RECALL[index_type]
        assert store.check()[0].structure == index_type
        for i in range(0, n, 9):
            found = store.find_source("n", f"d{i}")
            assert found is not None
            store.remove_document("n", found.doc_id)
        store.replace_documents("n", [item(f"d{i}", 7, edition=1) for i in range(1, n, 9)])
        assert recall(store) >= RECALL[index_type]
        assert_clean(store)
    with IndexStore(tmp_path) as store, caplog.at_level(logging.INFO, logger="ragserve_index"):
        assert recall(store) >= RECALL[index_type]
        assert store.check()[0].file == "current"
        assert_clean(store)
        assert not caplog.records  # a clean stop leaves nothing to build


@pytest.mark.parametrize("index_type", TYPES)
def test_every_vector_finds_itself_after_removals(tmp_path: Path, index_type: str) -> None:
    """With IVF inside an IDMap2 an id would answer for another vector after removals."""
    n = SIZE[index_type]
    with make(tmp_path, index_type) as store:
        fill(store, n)
        store.search("n", vectors_of("q"), 1)
        for i in range(0, n, 3):
            found = store.find_source("n", f"d{i}")
            assert found is not None
            store.remove_document("n", found.doc_id)
        kept = [i for i in range(n) if i % 3]
        for i in kept[:: len(kept) // 40]:
            vectors = vectors_of(f"d{i}", 0, n=10)
            found_texts = [hits[0].chunk.text if hits else "" for hits in store.search("n", vectors, 1).hits]
            right = sum(text == f"d{i}#0.{j}" for j, text in enumerate(found_texts))
            assert right >= 9, found_texts


def test_structures_grow_with_their_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sq8, "TRAIN_FROM", 100)
    monkeypatch.setattr(Ivf, "TRAIN_FROM", 400)
    for index_type, first, trained in (("sq8", 50, 100), ("ivf", 390, 400)):
        with make(tmp_path / index_type, index_type) as store:
            fill(store, first // 10)
            store.save()
            assert store.check()[0].structure == "flat"
            fill(store, (trained - first) // 10, prefix="more")
            store.save()
            assert store.check()[0].structure == index_type
            before = store.check()[0].index_bytes
            fill(store, trained, prefix="most")  # eleven times what it was trained on
            store.save()
            report = store.check()[0]
            assert report.ok
            assert report.index_bytes > before
            assert recall(store) >= 0.7
        with IndexStore(tmp_path / index_type) as store:
            assert store.check()[0].structure == index_type
            assert_clean(store)


def test_training_is_renewed_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = vectors_of("sample", n=2_000)
    sq8 = Sq8.train(sample[:1_000])
    sq8.add(np.arange(7_999), vectors_of("a", n=7_999))
    assert structures.why_rebuild("sq8", sq8) is None
    sq8.add(np.arange(7_999, 8_000), vectors_of("b"))
    assert "8,000" in str(structures.why_rebuild("sq8", sq8))
    ivf = Ivf.train(sample, 1_000)
    ivf.add(np.arange(124), vectors_of("a", n=124))
    assert "124" in str(structures.why_rebuild("ivf", ivf))  # less than an eighth of what its lists are for
    ivf.add(np.arange(124, 3_999), vectors_of("b", n=3_875))
    assert structures.why_rebuild("ivf", ivf) is None
    ivf.add(np.arange(3_999, 4_000), vectors_of("c"))
    assert "4,000" in str(structures.why_rebuild("ivf", ivf))


def test_a_graph_is_built_anew_when_a_fifth_of_it_is_dead(tmp_path: Path) -> None:
    with make(tmp_path, "hnsw") as store:
        fill(store, 100)
        store.save()
        for i in range(20):
            found = store.find_source("n", f"d{i}")
            assert found is not None
            store.remove_document("n", found.doc_id)
        store.save()
        assert store.check()[0].n_tombstones == 200
        found = store.find_source("n", "d20")
        assert found is not None
        store.remove_document("n", found.doc_id)
        store.save()
        report = store.check()[0]
        assert (report.n_tombstones, report.n_indexed) == (0, 790)
        assert_clean(store)
        assert recall(store) >= 0.95


def test_tombstones_survive_a_restart(tmp_path: Path) -> None:
    with make(tmp_path, "hnsw") as store:
        fill(store, 100)
        store.save()
        found = store.find_source("n", "d0")
        assert found is not None
        store.remove_document("n", found.doc_id)
    with IndexStore(tmp_path) as store:
        assert (store.check()[0].n_tombstones, store.check()[0].n_indexed) == (10, 990)
        assert all(not text.startswith("d0#") for text in texts(store, vectors_of("d0", 0, n=10)[3], 990))


def test_a_graph_answers_for_all_when_all_are_asked_for(tmp_path: Path) -> None:
    with make(tmp_path, "hnsw") as store:
        fill(store, 150)
        assert len(set(texts(store, vectors_of("q"), 5_000))) == 1_500


@pytest.mark.parametrize("index_type", ["ivf", "hnsw"])
def test_k_results_wherever_the_query_lies(tmp_path: Path, index_type: str) -> None:
    """Lists looked into may be empty, parts of a graph out of reach: k results come all the same."""
    with make(tmp_path, index_type) as store:
        fill(store, SIZE[index_type])
        _, ids, _ = store.search_ids("n", vectors_of("anywhere", n=50), 200)
        assert (ids > 0).all()
        assert all(len(set(row)) == 200 for row in ids.tolist())


def test_the_type_can_be_changed(tmp_path: Path) -> None:
    with make(tmp_path) as store, IndexStore(tmp_path) as other:
        fill(store, 150)
        assert texts(other, vectors_of("d7", 0, n=10)[2], 1) == ["d7#0.2"]
        for index_type in ("hnsw", "sq8", "flat"):
            info = store.rebuild("n", index_type=index_type)
            assert info.index_type == store.check()[0].structure == index_type
            assert store.check()[0].file == "current"
            assert texts(store, vectors_of("d7", 0, n=10)[2], 1) == ["d7#0.2"]
            other.save()
            assert other.check()[0].structure == index_type
            assert_clean(other)


def test_hnsw_widens_for_a_selection_too_large_to_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of the graph: more than is scored exactly, so the graph is walked with a wider beam."""
    n = 12_000 if EXHAUSTIVE else 1_500
    if not EXHAUSTIVE:
        monkeypatch.setattr(Hnsw, "EXACT_MAX", 1_000)
    vectors = vectors_of("x", n=n)
    graph = Hnsw.empty(vectors.shape[1])
    ids = np.arange(1, n + 1)
    graph.add(ids, vectors)
    keep = ids[ids % 10 != 0]
    selection = IdSelection(keep)
    queries = vectors_of("q", n=20)
    _, found = graph.search(queries, 10, selection)
    assert not (found % 10 == 0).any()
    assert overlap(found, exact(vectors[keep - 1], keep, queries, 10)[1]) >= 0.95


@pytest.mark.parametrize("index_type", TYPES)
def test_queries_that_are_not_finite(tmp_path: Path, index_type: str) -> None:
    with make(tmp_path, index_type) as store:
        fill(store, SIZE[index_type])
        for value in (np.nan, np.inf, -np.inf):
            for n, node in ((1, None), (1, Range(field="i", lt=40)), (30, None)):
                queries = vectors_of("q", n=n)
                queries[-1, 3] = value
                with pytest.raises(InvalidRequest, match="finite"):
                    store.search("n", queries, 5, filter=node)
