"""Edited and disabled chunks through IndexStore: what searches see, and what a new cut of the file keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragserve.errors import Conflict, InvalidRequest, NotFound
from ragserve_index import EvictionLog, IndexStore, NewChunk
from ragserve_index.batch import document_id
from ragserve_index.chunk_changes import ChunkState, NewText
from ragserve_index.corrections import MOST_LOST
from ragserve_index.sentence_vectors import SentenceVectors
from tests.unit.index.index_samples import (
    DIM,
    TYPES,
    UP_TO_FORMAT_6,
    Item,
    assert_clean,
    fill,
    item,
    make,
    on_both_registries,
    on_registries,
    texts,
    vectors_of,
)

pytestmark = on_registries
A = document_id("n", "a")


def new(text: str, *, sentences: bool = False) -> NewText:
    vector = vectors_of("edit", text)[0]
    own = SentenceVectors.of([0], vector[None]) if sentences else None
    return NewText(text, len(text.split()), vector, own)


def change(
    store: IndexStore, ordinal: int, text: str | None = None, disabled: bool | None = None, doc: str = A
) -> ChunkState:
    version = store.chunk_changes.state("n", doc, ordinal).version
    made = None if text is None else new(text)
    return store.chunk_changes.change("n", doc, ordinal, version, text=made, disabled=disabled)


def listed(store: IndexStore) -> list[tuple[int, str, bool, bool]]:
    return [
        (state.chunk.ordinal, state.chunk.text, state.chunk.edited, state.disabled)
        for state in store.chunk_changes.states("n", A)
    ]


def recut(names: list[str], edition: int) -> Item:
    """A document of these chunks."""
    document, _, _ = item("a", edition=edition)
    chunks = [
        NewChunk(name, 10 * i, 10 * i + len(name), n_tokens=2, page=i + 1) for i, name in enumerate(names)
    ]
    return document, chunks, np.concatenate([vectors_of(name) for name in names])


@on_both_registries
@pytest.mark.parametrize("index_type", TYPES)
def test_an_edited_chunk_is_found_by_its_new_text_alone(
    tmp_path: Path, registry: str, index_type: str
) -> None:
    with make(tmp_path / registry, index_type) as store:
        store.replace_documents("n", [item("a"), item("b")])
        before = store.document("n", A)
        state = change(store, 1, "the harbour master")
        assert state.original == "a#0.1"
        assert state.chunk.edited
        assert (state.chunk.start, state.chunk.end, state.chunk.page) == (10, 19, 2)
        assert state.chunk.header_chars == 0
        assert state.chunk.own_text == "the harbour master"
        assert texts(store, new("the harbour master").vector, 1) == ["the harbour master"]
        assert "a#0.1" not in texts(store, vectors_of("a", 0, n=3)[1], 10)
        (hits,) = store.search_text("n", "harbour", 5).hits
        assert [hit.chunk.text for hit in hits] == ["the harbour master"]
        document = store.document("n", A)
        assert (document.n_chunks, document.n_tokens) == (3, 2 + 3 + 2)
        assert (document.content_hash, document.created_at) == (before.content_hash, before.created_at)
        assert listed(store) == [
            (0, "a#0.0", False, False),
            (1, "the harbour master", True, False),
            (2, "a#0.2", False, False),
        ]
        assert_clean(store)


@on_both_registries
@pytest.mark.parametrize("index_type", TYPES)
def test_a_disabled_chunk_is_in_no_search_and_stays_listed(
    tmp_path: Path, registry: str, index_type: str
) -> None:
    with make(tmp_path / registry, index_type) as store:
        store.replace_documents("n", [item("a"), item("b")])
        chunk_id = store.document_chunks("n", A)[1].chunk_id
        vector = vectors_of("a", 0, n=3)[1]
        state = change(store, 1, disabled=True)
        assert state.disabled
        assert state.chunk.chunk_id == 0
        assert "a#0.1" not in texts(store, vector, 10)
        assert len(texts(store, vector, 10)) == 5
        (hybrid,) = store.search_text("n", "a#0.1", 9, vector=vector).hits
        assert "a#0.1" not in [hit.chunk.text for hit in hybrid]
        assert [chunk.ordinal for chunk in store.document_chunks("n", A)] == [0, 2]
        around = store.chunks_around("n", [store.document_chunks("n", A)[0].chunk_id], 1)
        assert [chunk.text for chunk in around.values()] == ["a#0.0", "a#0.2"]
        with pytest.raises(NotFound):
            store.chunks("n", [chunk_id])
        assert listed(store)[1] == (1, "a#0.1", False, True)
        assert_clean(store)
        assert not change(store, 1, disabled=False).disabled
        assert texts(store, vector, 1) == ["a#0.1"]
        assert_clean(store)


def test_a_document_may_be_disabled_chunk_by_chunk(store: IndexStore) -> None:
    store.replace_documents("n", [item("a", 2)])
    for ordinal in range(2):
        change(store, ordinal, disabled=True)
    assert store.document("n", A).n_chunks == 0
    assert texts(store, vectors_of("x")[0], 5) == []
    assert [disabled for *_, disabled in listed(store)] == [True, True]
    assert_clean(store)
    change(store, 0, disabled=False)
    assert texts(store, vectors_of("x")[0], 5) == ["a#0.0"]
    assert_clean(store)


def test_the_text_of_the_file_ends_an_edit(store: IndexStore) -> None:
    store.replace_documents("n", [item("a")])
    change(store, 1, "another")
    state = change(store, 1, "a#0.1")
    assert (state.original, state.chunk.edited) == (None, False)
    assert store.chunk_changes.rows_of("n", ["a"]) == {}
    assert texts(store, new("a#0.1").vector, 1) == ["a#0.1"]
    assert_clean(store)


def test_sentences_follow_the_text(store: IndexStore) -> None:
    store.replace_documents("n", [item("a")])
    version = store.chunk_changes.state("n", A, 0).version
    after = store.chunk_changes.change("n", A, 0, version, text=new("another", sentences=True))
    assert list(store.sentence_vectors("n", [after.chunk.chunk_id])) == [after.chunk.chunk_id]
    change(store, 1, disabled=True)  # of another chunk
    chunk = store.document_chunks("n", A)[0]
    assert len(store.sentence_vectors("n", [chunk.chunk_id])[chunk.chunk_id]) == 1


@on_both_registries
def test_a_change_that_has_not_seen_another_one_is_refused(store: IndexStore) -> None:
    store.replace_documents("n", [item("a")])
    seen = store.chunk_changes.state("n", A, 1).version
    change(store, 2, "elsewhere")
    assert store.chunk_changes.state("n", A, 1).version == seen, "other chunks do not matter"
    change(store, 1, "first")
    with pytest.raises(Conflict) as refused:
        store.chunk_changes.change("n", A, 1, seen, text=new("second"))
    assert refused.value.code == "chunk_changed"
    assert listed(store)[1][1] == "first"
    version = store.namespace("n").version
    change(store, 1, "first")
    change(store, 1, disabled=False)
    assert store.namespace("n").version == version, "nothing to do is no new version"


def test_chunks_and_documents_that_are_not_there_are_refused(store: IndexStore) -> None:
    store.replace_documents("n", [item("a")])
    for doc, ordinal in ((A, 3), (A, 2**40), ("doc_none", 0)):
        with pytest.raises(NotFound):
            store.chunk_changes.change("n", doc, ordinal, "", disabled=True)
    short, seen = NewText("short", 1, vectors_of("s", dim=DIM - 1)[0]), store.chunk_changes.state("n", A, 0)
    with pytest.raises(InvalidRequest):
        store.chunk_changes.change("n", A, 0, seen.version, text=short)
    assert_clean(store)


@on_both_registries
def test_a_new_cut_keeps_corrections_of_texts_that_are_still_there(store: IndexStore) -> None:
    store.replace_documents("n", [recut(["one", "two", "three", "four"], 0)])
    change(store, 1, "2")
    change(store, 2, disabled=True)
    change(store, 3, "4")
    (written,) = store.replace_documents("n", [recut(["zero", "one", "two", "three", "fourth"], 1)])
    assert listed(store) == [
        (0, "zero", False, False),
        (1, "one", False, False),
        (2, "2", True, False),
        (3, "three", False, True),
        (4, "fourth", False, False),
    ]
    chunk = store.chunk_changes.state("n", A, 2).chunk
    assert (chunk.start, chunk.end, chunk.page) == (20, 23, 3), "the place of the text in the new file"
    lost = store.chunk_changes.lost("n", [A], since=written.updated_at)[A]
    assert [(one.original, one.text) for one in lost] == [("four", "4")]
    assert_clean(store)
    (again,) = store.replace_documents("n", [recut(["two", "four"], 2)])
    assert listed(store) == [(0, "2", True, False), (1, "4", True, False)], "a lost one comes back"
    assert [one.original for one in store.chunk_changes.lost("n", [A], since=again.updated_at)[A]] == [
        "three"
    ]
    assert_clean(store)
    assert store.chunk_changes.forget_lost("n", A) == 1
    assert store.chunk_changes.lost("n", [A]) == {}


def test_of_equal_texts_the_nearest_keeps_the_correction(store: IndexStore) -> None:
    store.replace_documents("n", [recut(["same", "x", "same", "y", "same"], 0)])
    change(store, 2, "edited")
    change(store, 4, disabled=True)
    store.replace_documents("n", [recut(["same", "x", "z", "same", "y", "same"], 1)])
    assert [(text, disabled) for _, text, _, disabled in listed(store)] == [
        *(("same", False), ("x", False), ("z", False), ("edited", False), ("y", False), ("same", True))
    ]
    assert_clean(store)


def test_a_correction_that_the_file_takes_up_is_done_with(store: IndexStore) -> None:
    store.replace_documents("n", [recut(["teh harbour"], 0)])
    change(store, 0, "the harbour")
    store.replace_documents("n", [recut(["the harbour"], 1)])
    assert listed(store) == [(0, "the harbour", False, False)]
    assert store.chunk_changes.lost("n", [A]) == {}


def test_lost_corrections_are_bounded(store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_LOST == 1_000
    monkeypatch.setattr("ragserve_index.corrections.MOST_LOST", 2)
    for edition in range(4):
        store.replace_documents("n", [recut([f"text {edition}"], edition)])
        change(store, 0, f"edit {edition}")
    store.replace_documents("n", [recut(["end"], 9)])
    assert [one.text for one in store.chunk_changes.lost("n", [A])[A]] == ["edit 2", "edit 3"]


@on_both_registries
def test_corrections_go_with_their_document(store: IndexStore) -> None:
    for remove in (lambda: store.remove_document("n", A), lambda: store.drop_namespace("n")):
        store.ensure_namespace("n", embedder="e", dim=DIM)
        store.replace_documents("n", [item("a")])
        change(store, 0, "kept?")
        change(store, 1, disabled=True)
        remove()
        with store.database.read() as connection:
            assert connection.execute("SELECT count(*) FROM corrections").fetchone()[0] == 0
        store.ensure_namespace("n", embedder="e", dim=DIM)
        store.replace_documents("n", [item("a")])
        assert [text for _, text, *_ in listed(store)] == ["a#0.0", "a#0.1", "a#0.2"]
        assert_clean(store)


def test_texts_that_are_not_searched_any_more_are_logged_for_caches(store: IndexStore) -> None:
    store.replace_documents("n", [item("a")])
    log = EvictionLog(store.database)
    change(store, 0, "new")
    change(store, 1, disabled=True)
    assert {row.text for row in log.after(0, 99)} == {"a#0.0", "a#0.1"}
    change(store, 1, disabled=False)
    change(store, 0, "newer")
    assert {row.text for row in log.after(0, 99)} == {"a#0.0", "new"}


def test_a_large_document_keeps_its_vectors(store: IndexStore) -> None:
    fill(store, 1, 1_100)
    doc = document_id("n", "d0")
    vectors = vectors_of("d0", 0, n=1_100)
    change(store, 1_030, "middle", doc=doc)
    for at in (0, 1_023, 1_024, 1_029, 1_031, 1_099):
        assert texts(store, vectors[at], 1) == [f"d0#0.{at}"]
    page = store.chunk_changes.states("n", doc, after=1_029, limit=3)
    assert [state.chunk.text for state in page] == ["d0#0.1029", "middle", "d0#0.1031"]
    assert_clean(store)


@on_both_registries
def test_another_process_sees_the_change(tmp_path: Path, store: IndexStore, registry: str) -> None:
    store.replace_documents("n", [item("a")])
    with make(store.data_dir) as other:
        assert len(texts(other, new("new").vector, 9)) == 3
        change(store, 0, "new")
        change(store, 1, disabled=True)
        assert texts(other, new("new").vector, 9)[0] == "new"
        assert len(texts(other, new("new").vector, 9)) == 2
        assert_clean(other)


@on_both_registries
def test_what_fails_on_the_way_changes_nothing(store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.replace_documents("n", [item("a")])
    change(store, 0, "before")
    was = listed(store)

    def broken(*_: object) -> None:
        raise OSError("the process died")

    with monkeypatch.context() as patched:
        patched.setattr("ragserve_index.registry.commit_version", broken)
        with pytest.raises(OSError, match="died"):
            change(store, 1, "never")
    assert listed(store) == was
    assert texts(store, new("never").vector, 9).count("never") == 0
    assert_clean(store)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE corrections SET text = 'other' WHERE disabled = 0", "1 corrections do not agree"),
        ("UPDATE corrections SET ordinal = 2 WHERE disabled = 1", "1 corrections do not agree"),
        ("UPDATE corrections SET doc_id = 'doc_gone'", "2 corrections do not agree"),
        ("DELETE FROM corrections WHERE disabled = 0", "1 edited chunks have no correction"),
    ],
)
def test_check_finds_corrections_that_do_not_agree(store: IndexStore, statement: str, said: str) -> None:
    store.replace_documents("n", [item("a")])
    change(store, 0, "new")
    change(store, 1, disabled=True)
    with store.database.write() as connection:
        connection.execute(statement)
    (report,) = store.check("n")
    assert said in "; ".join(report.problems)


@on_both_registries
def test_a_registry_of_the_format_before_is_migrated(store: IndexStore, registry: str) -> None:
    store.replace_documents("n", [item("a")])
    with store.database.write() as connection:
        for statement in UP_TO_FORMAT_6.split(";"):
            connection.execute(statement)
        if registry == "postgres":
            connection.execute("UPDATE ragserve_registry SET format = 3")
        else:
            connection.execute("PRAGMA user_version = 6")
    with make(store.data_dir) as migrated:
        change(migrated, 0, "new")
        assert texts(migrated, new("new").vector, 1) == ["new"]
        assert_clean(migrated)


@on_both_registries
def test_embedding_again_leaves_a_text_that_was_changed_meanwhile(store: IndexStore) -> None:
    store.replace_documents("n", [item("a")])
    change(store, 0, "first")
    rows = store.chunk_changes.rows_of("n", ["a", "b"])["a"]
    change(store, 0, "second")
    store.chunk_changes.embed_again([(rows[0], replace(new("first"), n_tokens=9))])
    (row,) = store.chunk_changes.rows_of("n", ["a"])["a"]
    assert (row.text, row.n_tokens) == ("second", 1)
    assert [chunk.text for chunk in store.chunk_changes.as_cut("n", A)] == ["a#0.0", "a#0.1", "a#0.2"]


@on_both_registries
def test_of_changes_at_once_one_wins(store: IndexStore) -> None:
    store.replace_documents("n", [item("a")])
    seen = store.chunk_changes.state("n", A, 1).version

    def attempt(n: int) -> str:
        try:
            return store.chunk_changes.change("n", A, 1, seen, text=new(f"edit {n}")).chunk.text
        except Conflict as error:
            return error.code

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(attempt, range(8)))
    (won,) = (each for each in said if each != "chunk_changed")
    assert listed(store)[1][1] == won
    assert_clean(store)


@on_both_registries
def test_ingestions_at_the_same_time_lose_no_change(store: IndexStore) -> None:
    """The same cut is written again and again while chunks are changed."""
    store.replace_documents("n", [item("a")])

    def ingest(n: int) -> None:
        document, chunks, vectors = item("a")
        store.replace_documents("n", [(replace(document, content_hash=f"{n}"), chunks, vectors)])

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(ingest, n) for n in range(20)]
        for n in range(20):
            change(store, n % 3, f"edit {n}")
        for each in done:
            each.result()
    assert [text for _, text, *_ in listed(store)] == ["edit 18", "edit 19", "edit 17"]
    assert store.chunk_changes.lost("n", [A]) == {}
    assert_clean(store)
