"""Namespaces, documents and searches through IndexStore, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.errors import Conflict, InvalidRequest, NotFound, RagserveError
from ragserve_index import IndexStore, NewChunk, NewDocument
from tests.unit.index.index_samples import (
    DIM,
    all_chunks,
    assert_clean,
    exact,
    fill,
    item,
    make,
    on_both_registries,
    on_registries,
    open_store,
    texts,
    vectors_of,
)

pytestmark = on_registries


@on_both_registries
def test_a_document_comes_back_as_it_went_in(store: IndexStore) -> None:
    metadata: dict[str, Any] = {
        "lang": "en",
        "year": 2024,
        "score": 0.5,
        "draft": False,
        "note": None,
        "tags": ["a", "ü"],
    }
    document, chunks, vectors = item("a.md", 2, metadata=metadata)
    (written,) = store.replace_documents("n", [(document, chunks, vectors)])
    assert store.document("n", written.doc_id) == written == store.find_source("n", "a.md")
    assert (written.namespace, written.source, written.title, written.mime) == (
        "n",
        "a.md",
        document.title,
        "text/plain",
    )
    assert (written.n_chunks, written.n_tokens, written.size_bytes, written.metadata) == (2, 4, 20, metadata)
    first, second = store.document_chunks("n", written.doc_id)
    assert (first.text, first.start, first.end, first.page, first.ordinal) == (chunks[0].text, 0, 9, 1, 0)
    assert (second.source, second.title, second.metadata, second.ordinal) == (
        "a.md",
        document.title,
        metadata,
        1,
    )
    assert store.chunks("n", [second.chunk_id, first.chunk_id]) == [second, first]
    hit = store.search("n", vectors[1:], 1).hits[0][0]
    assert hit.chunk == second
    assert hit.score == pytest.approx(1, abs=1e-5)


@on_both_registries
def test_the_same_source_replaces(store: IndexStore) -> None:
    (old,) = store.replace_documents("n", [item("a", 5)])
    store.replace_documents("n", [item("b", 1)])
    assert len(texts(store, vectors_of("q"), 10)) == 6
    (new,) = store.replace_documents("n", [item("a", 2, edition=1)])
    assert (new.doc_id, new.created_at) == (old.doc_id, old.created_at)
    assert new.updated_at >= old.updated_at
    info = store.namespace("n")
    assert (info.n_documents, info.n_chunks, info.n_tokens, info.version) == (2, 3, 6, 3)
    assert sorted(texts(store, vectors_of("q"), 10)) == ["a#1.0", "a#1.1", "b#0.0"]
    assert_clean(store)


@on_both_registries
def test_chunk_ids_are_never_used_twice(store: IndexStore) -> None:
    seen: set[int] = set()
    for edition in range(4):
        (document,) = store.replace_documents("n", [item("a", 3, edition=edition)])
        ids = {chunk.chunk_id for chunk in store.document_chunks("n", document.doc_id)}
        assert not ids & seen
        seen |= ids
    store.remove_document("n", document.doc_id)
    (document,) = store.replace_documents("n", [item("a", 3)])
    assert not seen & {chunk.chunk_id for chunk in store.document_chunks("n", document.doc_id)}


@on_both_registries
def test_a_batch_is_one_version_and_an_empty_one_none(store: IndexStore) -> None:
    store.replace_documents("n", [item("a"), item("b"), item("c", 0)])
    assert store.namespace("n").version == 1
    assert store.replace_documents("n", []) == []
    assert store.namespace("n").version == 1
    assert store.search("n", vectors_of("q"), 3).version == 1


@on_both_registries
def test_removal(store: IndexStore) -> None:
    kept, gone = store.replace_documents("n", [item("a", 2), item("b", 2)])
    assert len(texts(store, vectors_of("q"), 10)) == 4
    assert store.remove_document("n", gone.doc_id) == gone
    assert store.find_source("n", "b") is None
    assert {text[0] for text in texts(store, vectors_of("b", 0, n=2)[0], 10)} == {"a"}
    assert [d.doc_id for d in store.documents("n")] == [kept.doc_id]
    assert_clean(store)


@on_both_registries
def test_chunks_are_read_in_pages(store: IndexStore) -> None:
    fill(store, 2, n_chunks=10)
    (doc_id, *_) = (document.doc_id for document in store.documents("n"))
    every = store.document_chunks("n", doc_id)
    assert len(every) == 10
    for after, limit in ((0, 3), (3, 3), (9, 3), (10, 1), (0, 10**6), (10**30, 5)):
        assert store.document_chunks("n", doc_id, after=after, limit=limit) == every[after : after + limit]


@on_both_registries
def test_documents_are_listed_in_pages(store: IndexStore) -> None:
    fill(store, 25, 1)
    listed, after = [], None
    while page := store.documents("n", limit=7, after=after):
        listed += page
        after = page[-1].doc_id
    assert [d.doc_id for d in listed] == sorted(d.doc_id for d in listed)
    assert len({d.source for d in listed}) == 25
    assert {d.source for d in store.documents("n", source_prefix="d1")} == {
        "d1",
        *(f"d1{i}" for i in range(10)),
    }
    assert store.documents("n", source_prefix="d%") == []


def test_search_finds_the_exact_best(store: IndexStore) -> None:
    fill(store, 40, 5)
    known = all_chunks(store)
    queries = vectors_of("queries", n=8)
    scores, ids, version = store.search_ids("n", queries, 7)
    true_scores, true_ids = exact(np.stack(list(known.values())), list(known), queries, 7)
    assert (ids == true_ids).all()
    np.testing.assert_allclose(scores, true_scores, atol=1e-5)
    result = store.search("n", queries, 7)
    assert [[hit.chunk.chunk_id for hit in row] for row in result.hits] == true_ids.tolist()
    assert result.version == version == 1


def test_more_results_wanted_than_there_are(store: IndexStore) -> None:
    query = vectors_of("q")
    assert store.search("n", query, 5).hits == [[]]
    fill(store, 2, 2)
    scores, ids, _ = store.search_ids("n", query, 6)
    assert scores.shape == ids.shape == (1, 6)
    assert (ids[0, :4] > 0).all()
    assert (ids[0, 4:] == -1).all()
    assert len(store.search("n", query, 10_000).hits[0]) == 4
    assert store.search("n", np.empty((0, DIM), dtype=np.float32), 3).hits == []


@pytest.mark.parametrize("k", [0, -1, 10_001, True, 1.5, None])
def test_k_out_of_range(store: IndexStore, k: Any) -> None:
    with pytest.raises(InvalidRequest, match="k must be") as caught:
        store.search("n", vectors_of("q"), k)
    assert caught.value.param == "k"


@pytest.mark.parametrize(
    "queries",
    [
        np.zeros(DIM),
        np.zeros((1, DIM + 1)),
        np.zeros((1, 1, DIM)),
        np.full((1, DIM), np.nan),
        np.full((1, DIM), np.inf),
    ],
    ids=["1d", "dim", "3d", "nan", "inf"],
)
def test_queries_that_are_none(store: IndexStore, queries: np.ndarray) -> None:
    with pytest.raises(InvalidRequest):
        store.search("n", queries.astype(np.float32), 3)


def test_unknown_namespace(store: IndexStore) -> None:
    query = vectors_of("q")
    for call in (
        lambda: store.namespace("x"),
        lambda: store.drop_namespace("x"),
        lambda: store.search("x", query, 1),
        lambda: store.search_ids("x", query, 1),
        lambda: store.documents("x"),
        lambda: store.find_source("x", "a"),
        lambda: store.replace_documents("x", [item("a")]),
        lambda: store.remove_document("x", "doc"),
        lambda: store.check("x"),
        lambda: store.rebuild("x"),
        lambda: store.save("x"),
    ):
        with pytest.raises(NotFound) as caught:
            call()
        assert caught.value.code == "namespace_not_found"


def test_unknown_document_and_chunk(store: IndexStore) -> None:
    for call in (store.document, store.remove_document, store.document_chunks):
        with pytest.raises(NotFound) as caught:
            call("n", "doc_0")
        assert caught.value.code == "document_not_found"
    with pytest.raises(NotFound) as caught:
        store.chunks("n", [7])
    assert caught.value.code == "chunk_not_found"


def test_namespaces_do_not_see_each_other(store: IndexStore) -> None:
    store.ensure_namespace("m", embedder="e", dim=DIM)
    (mine,) = store.replace_documents("n", [item("a", 2)])
    (other,) = store.replace_documents("m", [item("a", 2)])
    assert mine.doc_id != other.doc_id
    foreign = store.document_chunks("m", other.doc_id)[0]
    with pytest.raises(NotFound):
        store.chunks("n", [foreign.chunk_id])
    assert {hit.chunk.doc_id for hit in store.search("n", vectors_of("q"), 10).hits[0]} == {mine.doc_id}
    assert store.drop_namespace("m").n_chunks == 2
    assert [info.name for info in store.namespaces()] == ["n"]
    assert len(texts(store, vectors_of("q"), 10)) == 2


@on_both_registries
def test_a_namespace_made_anew_is_empty(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        fill(store, 3)
        store.save()
        store.drop_namespace("n")
        assert not list((tmp_path / "indexes").glob("*.faiss"))
        store.ensure_namespace("n", embedder="other", dim=4)
        assert store.search("n", vectors_of("q", dim=4), 3).hits == [[]]
        with pytest.raises(InvalidRequest):
            store.search("n", vectors_of("q"), 3)


def test_another_embedder_conflicts(store: IndexStore) -> None:
    assert store.ensure_namespace("n", embedder="e", dim=DIM, index_type="hnsw").index_type == "flat"
    for embedder, dim in (("other", DIM), ("e", DIM + 1)):
        with pytest.raises(Conflict, match="Use that embedder"):
            store.ensure_namespace("n", embedder=embedder, dim=dim)


@on_both_registries
@pytest.mark.parametrize("name", ["", ".a", "../x", "a b", "a/b", "é", "a" * 65, "a\n"])
def test_names_that_are_none(store: IndexStore, name: str) -> None:
    with pytest.raises(InvalidRequest):
        store.ensure_namespace(name, embedder="e", dim=4)


@pytest.mark.parametrize("index_type", ["IVF16,Flat", "idmap", "", "FLAT"])
def test_only_listed_types(tmp_path: Path, index_type: str) -> None:
    with pytest.raises(InvalidRequest, match="flat, sq8, ivf, hnsw"):
        open_store(tmp_path / "a", index_type=index_type)
    with open_store(tmp_path / "b") as store, pytest.raises(InvalidRequest):
        store.ensure_namespace("n", embedder="e", dim=4, index_type=index_type or "x")


def broken(**changes: Any) -> tuple[NewDocument, list[NewChunk], np.ndarray]:
    document, chunks, vectors = item("a", 2)
    vectors = changes.pop("vectors", vectors)
    chunks = changes.pop("chunks", chunks)
    return dataclasses.replace(document, **changes), chunks, vectors


@on_both_registries
@pytest.mark.parametrize(
    "bad",
    [
        broken(vectors=vectors_of("x", n=3)),
        broken(vectors=vectors_of("x", n=2, dim=4)),
        broken(vectors=np.zeros((2, DIM))),
        broken(vectors=np.full((2, DIM), np.nan)),
        broken(vectors=2 * vectors_of("x", n=2)),
        broken(chunks=[NewChunk("t", 5, 3, 1)] * 2),
        broken(chunks=[NewChunk("\ud800", 0, 1, 1)] * 2),
        broken(source=""),
        broken(source="a\0b"),
        broken(source="\udcff"),
        broken(metadata={"a": {"nested": 1}}),
        broken(metadata={"a": [1]}),
        broken(metadata={"a": float("inf")}),
        broken(metadata={"a": 2**63}),
        broken(metadata={"a": "\0"}),
        broken(metadata={"a": "\ud800"}),
        broken(metadata={1: "a"}),
    ],
    ids=str,
)
def test_documents_that_cannot_be_stored_leave_nothing(store: IndexStore, bad: Any) -> None:
    with pytest.raises(InvalidRequest):
        store.replace_documents("n", [item("good"), bad])
    assert (store.namespace("n").version, store.namespace("n").n_documents) == (0, 0)
    assert_clean(store)


def test_a_source_twice_in_a_batch(store: IndexStore) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        store.replace_documents("n", [item("a"), item("a")])


@on_both_registries
def test_a_large_document(store: IndexStore) -> None:
    """More chunks than a row of vectors holds, and than a slab has room for."""
    store.replace_documents("n", [item("big", 20_000)])
    assert texts(store, vectors_of("big", 0, n=20_000)[12_345], 1) == ["big#0.12345"]
    assert_clean(store)


def test_after_close_everything_says_so(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.close()
    store.close()
    with pytest.raises(RagserveError, match="closed"):
        store.search("n", vectors_of("q"), 1)
    with pytest.raises(RagserveError, match="closed"):
        store.replace_documents("n", [item("a")])


@on_both_registries
def test_a_closed_store_leaves_no_file_descriptor_though_someone_still_refers_to_it(tmp_path: Path) -> None:
    make(tmp_path).close()
    before = sorted(os.listdir("/proc/self/fd"))
    store = open_store(tmp_path)
    store.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
