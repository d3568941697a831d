"""Words in Postgres: scores, damage, and the indexes of words that servers have beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragserve.errors import NotFound, Unavailable
from ragserve_index import IndexStore, NewChunk, NewDocument, lexical_indexes, lexical_search, registry
from ragserve_index.batch import document_id
from ragserve_index.database import Connection
from ragserve_index.lexical_index import folder_of
from ragserve_index.postgres.full_text import FullText
from tests.unit.index.index_samples import DIM, UP_TO_FORMAT_6, assert_clean, fill, item, texts, vectors_of

CORPUS = {
    "cafe": "Ein naïves Café in Ångström, tea and coffee",
    "lamps": "lighting the lamps, the lamp that lights lamps",
    "code": "def foo_bar(x1): return 3.14 * x1  # e-mail a@b.org http://c.net/d",
    "soup": "leeks and potatoes, a soup of 1e5 leeks",
    "greek": "Ο φάρος του Σκέρυβορ και η θάλασσα",
}


def test_words_score_as_in_sqlite(tmp_path: Path, url: str) -> None:
    found = []
    for registry_url in (None, url):
        with IndexStore(tmp_path / str(registry_url is None), registry_url=registry_url) as store:
            store.ensure_namespace("n", embedder="e", dim=DIM)
            store.replace_documents(
                "n",
                [
                    (
                        NewDocument(name, f"On {name}", "h", "text/plain", 1, {}),
                        [NewChunk(text, 0, len(text), 1)],
                        vectors_of(name),
                    )
                    for name, text in CORPUS.items()
                ],
            )
            queries = [
                "naive CAFÉ",
                "who lights a lamp",
                "angstrom",
                "foo bar x1",
                "leeks 1e5",
                "ΦΆΡΟΣ θάλασσα",
                "the",
            ]
            found.append(
                [
                    {hit.chunk.source: hit.score for hit in store.search_text("n", query, 10).hits[0]}
                    for query in queries
                ]
            )
    in_sqlite, in_postgres = found
    assert all(in_sqlite), "each finds something"
    for one, other in zip(in_sqlite, in_postgres, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def test_check_finds_a_damaged_lexical_index_and_a_rebuild_mends_it(
    fronts: tuple[IndexStore, IndexStore],
) -> None:
    store, _ = fronts
    fill(store, 3)
    for statement, says in (
        ("DELETE FROM lexical_1 WHERE chunk_id = 7", "1 chunks are missing from the lexical index: [7]"),
        ("UPDATE lexical_sizes SET n_words = 1", "words, not 1"),
        ("DROP TABLE lexical_1", "there is no table"),
    ):
        with store.database.write() as connection:
            connection.execute(statement)
        assert says in " ".join(store.check()[0].problems)
        store.rebuild_lexical("n")
        assert_clean(store)
        assert len(store.search_text("n", "d1", 50).hits[0]) == 10


def test_nul_is_stored_as_the_replacement_character(fronts: tuple[IndexStore, IndexStore]) -> None:
    store, _ = fronts
    document, chunks, vectors = item("a", 1)
    store.replace_documents("n", [(document, [NewChunk("one\0two", 0, 7, 1)], vectors)])
    assert chunks
    assert texts(store, vectors[0], 1) == ["one\ufffdtwo"]


def test_each_server_has_an_index_of_words_that_follows_all(
    fronts: tuple[IndexStore, IndexStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexical_indexes, "FROM", 1)
    one, two = fronts
    fill(one, 5)
    for front in fronts:
        front.save("n")
        assert folder_of(front.data_dir / "indexes", 1).exists()
    monkeypatch.setattr(lexical_search, "search", None)  # Postgres is not asked any more
    for edition, (writer, reader) in enumerate([(one, two), (two, one), (one, two)], 1):
        writer.replace_documents("n", [item("d1", 4, edition=edition)])
        found = {hit.chunk.text for hit in reader.search_text("n", "d1", 50).hits[0]}
        assert found == {f"d1#{edition}.{i}" for i in range(4)}
        assert_clean(reader)


def test_a_lost_connection_does_not_cost_the_index_of_words(
    fronts: tuple[IndexStore, IndexStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lexical_indexes, "FROM", 1)
    one, two = fronts
    fill(one, 5)
    two.save("n")
    one.replace_documents("n", [item("d1", 4, edition=1)])

    def cut(connection: Connection, *rest: object) -> None:
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "stamp_of", cut)
        with pytest.raises(Unavailable, match="connection to the registry"):
            two.search_text("n", "d1", 50)
    assert len(two.search_text("n", "d1", 50).hits[0]) == 4
    two.save("n")
    monkeypatch.setattr(lexical_search, "search", None)
    assert len(two.search_text("n", "d1", 50).hits[0]) == 4
    assert not caplog.messages


def test_a_word_in_more_chunks_than_are_left_is_still_found(
    fronts: tuple[IndexStore, IndexStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frequent words are not counted again after every change."""
    monkeypatch.setattr(lexical_search, "_COUNTED", 10)
    store, _ = fronts
    fill(store, 40)
    assert len(store.search_text("n", "d1 title", 500).hits[0]) == 400
    store.remove_document("n", document_id("n", "d1"))
    assert len(store.search_text("n", "d1 title", 500).hits[0]) == 390


def test_a_namespace_dropped_during_a_search_is_not_found(
    fronts: tuple[IndexStore, IndexStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    count = FullText.count

    def dropped(self: FullText, connection: Connection, namespace_id: int, word: str) -> int:
        one.drop_namespace("n")
        return count(self, connection, namespace_id, word)

    for search in (lambda: two.search_text("n", "d1", 5), lambda: two.word_counts("n", ["d1"])):
        fill(one, 3)
        with monkeypatch.context() as patch:
            patch.setattr(FullText, "count", dropped)
            with pytest.raises(NotFound):
                search()
        one.ensure_namespace("n", embedder="e", dim=DIM)
        assert two.search_text("n", "d1", 5).hits == [[]]


def test_a_registry_of_format_1_gets_its_words_cut_anew(tmp_path: Path, url: str) -> None:
    with IndexStore(tmp_path / "a", registry_url=url) as store:
        store.ensure_namespace("n", embedder="e", dim=DIM)
        fill(store, 3)
        with store.database.write() as connection:
            for statement in (
                "DROP TABLE lexical_words",
                "DROP TABLE namespace_settings",
                "CREATE TEXT SEARCH DICTIONARY ragserve_stem (TEMPLATE = snowball, LANGUAGE = porter)",
                'CREATE TEXT SEARCH CONFIGURATION ragserve (PARSER = "default")',
                "UPDATE lexical_1 SET words = to_tsvector('ragserve', 'other words')",
                *UP_TO_FORMAT_6.split(";"),
                "UPDATE ragserve_registry SET format = 1",
            ):
                connection.execute(statement)
    for name in ("a", "b"):
        with IndexStore(tmp_path / name, registry_url=url) as store:
            assert len(store.search_text("n", "d1", 50).hits[0]) == 10
            assert_clean(store)
