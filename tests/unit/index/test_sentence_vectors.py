"""Embedded sentences of chunks: rounded, stored with the chunk, gone with it."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragserve.errors import InvalidRequest
from ragserve_index import IndexStore
from ragserve_index.sentence_vectors import SentenceVectors
from tests.unit.index.index_samples import DIM, UP_TO_FORMAT_6, Item, item, make, vectors_of


def with_sentences(source: str, n_chunks: int, n_sentences: int) -> Item:
    """`item`, every other chunk with ``n_sentences`` sentences."""
    document, chunks, vectors = item(source, n_chunks)
    starts = [3 * i for i in range(n_sentences)]
    chunks = [
        replace(chunk, sentences=SentenceVectors.of(starts, vectors_of(source, i, n=n_sentences)))
        if i % 2 == 0
        else chunk
        for i, chunk in enumerate(chunks)
    ]
    return document, chunks, vectors


def ids_of(store: IndexStore, source: str) -> list[int]:
    [document] = [each for each in store.documents("n") if each.source == source]
    return [chunk.chunk_id for chunk in store.document_chunks("n", document.doc_id)]


@pytest.mark.parametrize("dim", [1, 16, 63, 384])
def test_a_score_is_the_cosine_but_for_rounding(dim: int) -> None:
    vectors = vectors_of("sentences", n=40, dim=dim)
    [query] = vectors_of("query", dim=dim)
    stored = SentenceVectors.decode(SentenceVectors.of(range(40), vectors).encode(), dim)
    assert stored.starts.tolist() == list(range(40))
    assert np.abs(stored.scores(query) - vectors @ query).max() < 0.01
    assert len(SentenceVectors.of(range(40), vectors).encode()) == 40 * (dim + 6)


def test_no_sentence_and_a_vector_of_zeros_can_be_stored() -> None:
    assert len(SentenceVectors.decode(b"", 16)) == 0
    nothing = SentenceVectors.of([0], np.zeros((1, 16), dtype=np.float32))
    assert SentenceVectors.decode(nothing.encode(), 16).scores(vectors_of("q")[0]).tolist() == [0.0]
    with pytest.raises(ValueError, match="no sentences of 16 components"):
        SentenceVectors.decode(b"x" * 23, 16)


def test_sentences_live_and_die_with_their_chunk(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        store.replace_documents("n", [with_sentences("a", 3, 4), item("b", 2)])
        store.ensure_namespace("other", embedder="e", dim=DIM)
        first, second, third = ids_of(store, "a")
        found = store.sentence_vectors("n", [third, second, first, 999, *ids_of(store, "b")])
        assert sorted(found) == [first, third]
        assert found[third].encode() == SentenceVectors.of([0, 3, 6, 9], vectors_of("a", 2, n=4)).encode()
        assert store.sentence_vectors("other", [first]) == {}, "no other namespace's chunks"
        assert store.check("n")[0].problems == ()
        store.replace_documents("n", [item("a", 1, edition=1)])
        assert store.sentence_vectors("n", [first, third, *ids_of(store, "a")]) == {}
    with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
        assert connection.execute("SELECT count(*) FROM sentences").fetchone() == (0,)
    connection.close()


def test_sentences_of_another_embedder_are_refused_with_the_whole_batch(tmp_path: Path) -> None:
    document, chunks, vectors = item("a", 1)
    wrong = replace(chunks[0], sentences=SentenceVectors.of([0], vectors_of("x", dim=DIM + 1)))
    with make(tmp_path) as store:
        with pytest.raises(InvalidRequest, match=r"sentences of shape \[1, 17\]"):
            store.replace_documents("n", [(document, [wrong], vectors)])
        assert store.documents("n") == []


def test_a_row_of_a_wrong_length_is_a_problem(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        store.replace_documents("n", [with_sentences("a", 1, 2)])
        with store.database.write() as connection:
            connection.execute("UPDATE sentences SET data = x'00'")
        [report] = store.check("n")
    assert any("rows of sentences have a wrong length" in problem for problem in report.problems)


def test_a_registry_of_the_third_format_has_no_sentences_and_takes_new_ones(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        store.replace_documents("n", [item("a", 2)])
    with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
        connection.execute("DROP TABLE sentences")
        connection.execute("DROP TABLE lexical_words")
        connection.execute("DROP TABLE namespace_settings")
        connection.executescript(UP_TO_FORMAT_6)
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    with IndexStore(tmp_path) as store:
        assert store.sentence_vectors("n", ids_of(store, "a")) == {}
        store.replace_documents("n", [with_sentences("b", 1, 2)])
        assert list(store.sentence_vectors("n", ids_of(store, "b"))) == ids_of(store, "b")
