"""Labels: a store as a viewer sees it is a store in which nothing else ever was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragserve.errors import Forbidden, InvalidRequest, NotFound, RagserveError
from ragserve_index import Eq, IndexStore, NewChunk
from ragserve_index.index.namespace_index import NamespaceIndex
from ragserve_index.viewers import EVERYTHING, UNLABELLED, Viewer, checked_labels
from tests.unit.index.index_samples import (
    TYPES,
    Item,
    all_chunks,
    assert_clean,
    fill,
    item,
    make,
    on_both_registries,
    on_registries,
    open_store,
    vectors_of,
)

pytestmark = on_registries
HR, LEGAL, BOTH = (Viewer.holding(names) for names in (["hr"], ["legal"], ["hr", "legal"]))
QUERY = vectors_of("query")


def labelled(source: str, *labels: str, text: str | None = None, n_chunks: int = 1, **more: Any) -> Item:
    document, chunks, vectors = item(source, n_chunks, **more)
    if text is not None:
        chunks = [NewChunk(text, 0, len(text), len(text.split()))]
    return replace(document, labels=labels), chunks, vectors


@pytest.fixture
def labels(store: IndexStore) -> IndexStore:
    """Documents without labels, with one, with another and with both."""
    store.replace_documents(
        "n",
        [
            labelled("open", n_chunks=2),
            labelled("salaries", "hr"),
            labelled("contract", "legal"),
            labelled("dispute", "hr", "legal"),
        ],
    )
    return store


def seen(store: IndexStore, viewer: Viewer) -> list[str]:
    return sorted(each.source for each in store.seen_by(viewer).documents("n"))


@on_both_registries
def test_a_document_is_seen_by_those_who_hold_one_of_its_labels(labels: IndexStore) -> None:
    assert seen(labels, UNLABELLED) == ["open"]
    assert seen(labels, HR) == ["dispute", "open", "salaries"]
    assert seen(labels, LEGAL) == ["contract", "dispute", "open"]
    assert seen(labels, BOTH) == seen(labels, EVERYTHING) == ["contract", "dispute", "open", "salaries"]
    assert seen(labels, Viewer.holding(["*"])) == seen(labels, EVERYTHING)
    assert [labels.seen_by(each).hides("n") for each in (EVERYTHING, BOTH, HR, UNLABELLED)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert labels.seen_by(BOTH).hides("none")
    assert not labels.hides("none")


@on_both_registries
def test_numbers_listings_and_labels_are_those_of_what_is_seen(labels: IndexStore) -> None:
    ours = labels.seen_by(HR)
    info = ours.namespace("n")
    assert (info.n_documents, info.n_chunks, info.n_tokens) == (3, 4, 8)
    assert ours.namespaces() == [info]
    assert labels.namespace("n").n_documents == 4
    shown = {each.source: each.labels for each in ours.documents("n")}
    assert shown == {"open": (), "salaries": ("hr",), "dispute": ("hr",)}, "legal is not ours to know of"
    assert ours.labels("n") == ["hr"]
    assert len(ours.documents("n", limit=2)) == 2
    assert [each.source for each in ours.documents("n", filter=Eq(field="source", value="contract"))] == []


@on_both_registries
def test_what_is_hidden_reads_like_what_never_was(labels: IndexStore) -> None:
    hidden = next(each for each in labels.documents("n") if each.source == "contract")
    chunk = labels.document_chunks("n", hidden.doc_id)[0].chunk_id
    ours = labels.seen_by(HR)

    def error(ask: Any, name: Any, other: Any) -> tuple[str, str]:
        with pytest.raises(NotFound) as theirs:
            ask(name)
        with pytest.raises(NotFound) as nobodys:
            ask(other)
        said = str(theirs.value).replace(str(name), "X")
        assert said == str(nobodys.value).replace(str(other), "X")
        return theirs.value.code, said

    other = hidden.doc_id[:-1] + ("0" if hidden.doc_id[-1] != "0" else "1")
    for read in (
        lambda name: ours.document("n", name),
        lambda name: ours.document_chunks("n", name),
        lambda name: ours.remove_document("n", name),
        lambda name: ours.set_labels("n", [name], only=[]),
    ):
        assert error(read, hidden.doc_id, other)[0] == "document_not_found"
    assert error(lambda i: ours.chunks("n", [i]), chunk, 10**9)[0] == "chunk_not_found"
    assert ours.find_source("n", "contract") is None
    assert ours.chunks_around("n", [chunk], 2) == {} == ours.sentence_vectors("n", [chunk])
    assert ours.hidden("n", ["contract", hidden.doc_id, "open", "nothing"]) == {"contract", hidden.doc_id}
    assert labels.hidden("n", ["contract"]) == set()
    with pytest.raises(Forbidden, match="documents with labels"):
        ours.drop_namespace("n")
    assert_clean(labels)


@pytest.mark.parametrize("index_type", TYPES)
def test_k_are_found_where_k_are_seen(tmp_path: Path, index_type: str) -> None:
    """Against the exact order of all that is seen, for shares from 2 % to 98 %."""
    with make(tmp_path, index_type) as store:
        batch = [
            labelled(f"d{i}", *(["rare"] if i % 50 == 0 else ["common"]), n_chunks=2) for i in range(400)
        ]
        store.replace_documents("n", batch)
        every = all_chunks(store)
        for name, share in (("rare", 16), ("common", 784)):
            ours = store.seen_by(Viewer.holding([name]))
            mine = {hit.chunk.chunk_id for hit in ours.search("n", QUERY, 800).hits[0]}
            assert len(mine) == share
            best = sorted(mine, key=lambda i: -float(every[i] @ QUERY[0]))[:10]
            found = [hit.chunk.chunk_id for hit in ours.search("n", QUERY, 10).hits[0]]
            assert len(found) == 10
            assert len(set(found) & set(best)) >= (10 if index_type in ("flat", "hnsw") else 8)
            filtered = ours.search("n", QUERY, 10, filter=Eq(field="source", value="d0")).hits[0]
            assert len(filtered) == (2 if name == "rare" else 0)


@on_both_registries
def test_a_label_that_is_taken_away_is_gone_from_the_next_search(labels: IndexStore, tmp_path: Path) -> None:
    """Also in another process's store, and with what earlier searches have cached."""
    with open_store(tmp_path / "data") as other:

        def found(store: IndexStore, viewer: Viewer) -> set[str]:
            ours = store.seen_by(viewer)
            dense = {hit.chunk.source for hit in ours.search("n", QUERY, 9).hits[0]}
            words = {hit.chunk.source for hit in ours.search_text("n", "title", 9).hits[0]}
            both = {hit.chunk.source for hit in ours.search_text("n", "title", 9, vector=QUERY[0]).hits[0]}
            assert dense == words == both
            return dense

        doc = next(each.doc_id for each in labels.documents("n") if each.source == "salaries")
        for store in (labels, other):
            assert found(store, HR) == {"open", "salaries", "dispute"}
        assert labels.set_labels("n", [doc], add=["legal"], remove=["hr"])[0].labels == ("legal",)
        for store in (labels, other):
            assert found(store, HR) == {"open", "dispute"}
            assert found(store, LEGAL) == {"open", "contract", "dispute", "salaries"}
        labels.set_labels("n", [doc], only=[])
        for store in (labels, other):
            assert found(store, UNLABELLED) == {"open", "salaries"}
        assert_clean(labels)


@on_both_registries
def test_a_search_under_way_does_not_show_what_is_hidden_meanwhile(
    labels: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are read after the index was searched: the same chunk, which is another's by then."""
    doc = next(each.doc_id for each in labels.documents("n") if each.source == "salaries")
    search = NamespaceIndex.search

    def then_hidden(*args: Any) -> Any:
        found = search(*args)
        labels.set_labels("n", [doc], only=["board"])
        return found

    monkeypatch.setattr(NamespaceIndex, "search", then_hidden)
    hits = labels.seen_by(HR).search("n", QUERY, 9).hits[0]
    assert {hit.chunk.source for hit in hits} == {"open", "dispute"}


WORDS = {"a": "the lamp of the tower", "b": "a lamp and a rope", "c": "the rope of the ship at sea"}


@on_both_registries
@pytest.mark.parametrize("n_hidden", [3, 40])
def test_scores_and_counts_do_not_tell_what_is_hidden(store: IndexStore, n_hidden: int) -> None:
    """The same documents are found with the same BM25, whatever words the hidden ones have."""
    store.replace_documents("n", [labelled(name, text=text) for name, text in WORDS.items()])
    store.replace_documents("n", [labelled("z", "board", text="nothing")])
    ours = store.seen_by(UNLABELLED)

    def told() -> Any:
        found = ours.search_text("n", "lamp rope", 9).hits[0]
        both = ours.search_text("n", "lamp rope", 9, variants=["the sea"], vector=QUERY[0]).hits[0]
        counts = ours.word_counts("n", ["lamp", "rope", "zephyr", "sea ship"])
        rows = [
            [(hit.chunk.source, hit.score, hit.bm25, hit.cosine) for hit in hits] for hits in (found, both)
        ]
        return rows, counts, ours.namespace("n").n_chunks

    before = told()
    assert [row[0] for row in before[0][0]] == ["b", "a", "c"]
    assert before[1] == {"lamp": 2, "rope": 2, "zephyr": 0, "sea ship": 1}
    hidden = [labelled(f"h{i}", "board", text=f"lamp zephyr lamp {i}") for i in range(n_hidden)]
    store.replace_documents("n", hidden)
    assert told() == before
    assert store.word_counts("n", ["zephyr"]) == {"zephyr": n_hidden}


def test_a_large_namespace_ranks_by_what_is_seen(tmp_path: Path) -> None:
    """Where tantivy answers: its best of all chunks, scored by the viewer's."""
    with make(tmp_path) as store:
        fill(store, 205, 10)
        hidden = [labelled(f"h{i}", "board", text=f"lighthouse h{i}") for i in range(200)]
        store.replace_documents("n", [*hidden, labelled("ours", text="a lighthouse by the sea")])
        ours = store.seen_by(UNLABELLED)
        assert [hit.chunk.source for hit in ours.search_text("n", "lighthouse", 5).hits[0]] == ["ours"]
        assert len(store.search_text("n", "lighthouse", 500).hits[0]) == 201
        assert ours.word_counts("n", ["lighthouse"]) == {"lighthouse": 1}


@on_both_registries
def test_labels_stay_with_a_document_that_is_replaced(labels: IndexStore) -> None:
    labels.replace_documents("n", [item("salaries", 2, edition=1)])
    assert seen(labels, UNLABELLED) == ["open"]
    labels.replace_documents("n", [labelled("salaries", "legal", edition=2)])
    assert seen(labels, HR) == ["dispute", "open"]
    labels.replace_documents("n", [labelled("salaries")])
    assert seen(labels, UNLABELLED) == ["open", "salaries"]


def test_a_viewer_writes_no_document_and_no_label_that_it_does_not_hold(labels: IndexStore) -> None:
    ours = labels.seen_by(HR)
    with pytest.raises(Forbidden, match="contract"):
        ours.replace_documents("n", [labelled("new"), labelled("contract")])
    assert seen(labels, EVERYTHING) == ["contract", "dispute", "open", "salaries"], "nothing of the batch"
    doc = next(each.doc_id for each in ours.documents("n") if each.source == "dispute")
    for wrong in ({"add": ["legal"]}, {"only": ["legal"]}, {"remove": ["legal"]}):
        with pytest.raises(Forbidden, match="legal"):
            ours.set_labels("n", [doc], **wrong)
    assert ours.set_labels("n", [doc], only=[])[0].labels == ()
    assert seen(labels, UNLABELLED) == ["open"], "it is still of those who hold legal"
    assert seen(labels, LEGAL) == ["contract", "dispute", "open"]
    with pytest.raises(NotFound):
        labels.set_labels("n", [doc, "doc_none"], only=["x"])
    assert labels.document("n", doc).labels == ("legal",), "all are changed, or none"


def test_labels_that_are_none(labels: IndexStore) -> None:
    for wrong in (["a b"], [""], ["*"], ["é"], ["x" * 65], ["a,b"], [f"l{i}" for i in range(33)]):
        with pytest.raises(InvalidRequest) as caught:
            checked_labels(wrong)
        assert caught.value.code == "invalid_labels"
    with pytest.raises(InvalidRequest):
        labels.replace_documents("n", [labelled("x", "a b")])
    assert checked_labels(["b", "a", "b", "CN:eng/sre@corp.example"]) == ("CN:eng/sre@corp.example", "a", "b")


def test_a_view_of_a_closed_store_is_closed_with_it(tmp_path: Path) -> None:
    store = make(tmp_path)
    ours = store.seen_by(UNLABELLED)
    ours.close()
    assert ours.namespace("n").n_documents == 0, "closing a view leaves the store open"
    store.close()
    with pytest.raises(RagserveError, match="closed"):
        ours.namespace("n")
