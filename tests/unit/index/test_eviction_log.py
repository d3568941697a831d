"""The log of texts that went away: what is in it, what is not, and that it is as durable as the removal."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from ragserve_index import EvictionLog, IndexStore
from tests.unit.index.index_samples import (
    UP_TO_FORMAT_6,
    assert_clean,
    item,
    make,
    on_both_registries,
    on_registries,
    on_sqlite,
    open_store,
    until,
)

pytestmark = on_registries


def logged(log: EvictionLog, last_id: int = 0) -> list[tuple[str, str, str | None]]:
    return [(row.namespace, row.title, row.text) for row in log.after(last_id, 1000)]


@pytest.fixture
def store(tmp_path: Path, registry: str) -> IndexStore:
    store = make(tmp_path)
    store.replace_documents("n", [item("a", 2), item("b", 1)])
    return store


@on_both_registries
def test_removed_and_replaced_texts_are_logged_and_what_stays_is_not(store: IndexStore) -> None:
    log = EvictionLog(store.database)
    assert logged(log) == []
    document, chunks, vectors = item("a", 2, edition=1)
    kept = item("a", 2)[1][0]
    store.replace_documents("n", [(document, [kept, chunks[1]], vectors)])
    assert logged(log) == [("n", "title of a", "a#0.1")], "a#0.0 is in the new edition, too"
    store.remove_document("n", store.documents("n", source_prefix="b")[0].doc_id)
    assert logged(log)[1:] == [("n", "title of b", "b#0.0")]
    store.close()


@on_both_registries
def test_a_text_that_comes_back_leaves_the_log(store: IndexStore) -> None:
    log = EvictionLog(store.database)
    store.replace_documents("n", [item("a", 2, edition=1)])
    store.replace_documents("n", [item("a", 1)])
    assert sorted(text or "" for _, _, text in logged(log)) == ["a#0.1", "a#1.0", "a#1.1"]
    store.close()


@on_both_registries
def test_a_dropped_namespace_is_one_row(store: IndexStore) -> None:
    log = EvictionLog(store.database)
    store.replace_documents("n", [item("a", 2, edition=1)])
    store.drop_namespace("n")
    assert logged(log) == [("n", "", None)]
    store.close()


@on_both_registries
def test_readers_keep_their_place_and_rows_go_by_age(store: IndexStore) -> None:
    log = EvictionLog(store.database)
    before = time.time()
    until(lambda: log.mark() is not None)  # Postgres tells of commits a little later
    mark = log.mark()
    store.replace_documents("n", [item("a", 1, edition=1)])
    until(lambda: log.mark() not in (None, mark))
    last = log.after(0, 1)[0].id
    assert logged(log, last) == [("n", "title of a", "a#0.1")]
    assert log.after(0, 10, before=before) == []
    assert log.forget(last, before=before) == 0
    assert log.forget(last) == 1
    assert len(log) == 1
    store.close()


@on_both_registries
def test_nothing_is_logged_when_the_write_fails(store: IndexStore) -> None:
    document, chunks, vectors = item("a", 1, edition=1)
    with pytest.raises(Exception, match="lone surrogate"):
        store.replace_documents("n", [(document, [chunks[0].__class__("\ud800", 0, 1, 1)], vectors)])
    assert logged(EvictionLog(store.database)) == []
    store.close()


@on_sqlite
def test_a_registry_of_the_first_format_is_brought_up(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        store.replace_documents("n", [item("a", 2)])
    with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
        connection.execute("DROP TABLE evictions")
        connection.execute("DROP TABLE sentences")
        connection.execute("DROP TABLE lexical_words")
        connection.executescript(UP_TO_FORMAT_6)
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with open_store(tmp_path) as store:
        assert_clean(store)
        store.replace_documents("n", [item("a", 1, edition=1)])
        assert len(EvictionLog(store.database)) == 2
