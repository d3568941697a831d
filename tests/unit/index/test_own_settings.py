"""A namespace's own settings last as long as the namespace."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ragserve.errors import NotFound
from ragserve_index import IndexStore
from tests.unit.index.index_samples import UP_TO_FORMAT_6, make, on_both_registries, open_store

OWN = {"k": 3, "system": "Répondez."}


@on_both_registries
@pytest.mark.usefixtures("registry")
def test_they_are_replaced_and_go_with_the_namespace(store: IndexStore, tmp_path: Path) -> None:
    assert store.settings("n") == {}
    store.set_settings("n", OWN | {"retrieval": "hybrid"})
    store.set_settings("n", OWN)
    assert store.settings("n") == OWN
    assert store.settings("not-there") == {}
    with pytest.raises(NotFound):
        store.set_settings("not-there", OWN)
    store.drop_namespace("n")
    store.ensure_namespace("n", embedder="e", dim=4)
    assert store.settings("n") == {}


def test_a_registry_of_the_format_before_has_room_for_them(tmp_path: Path) -> None:
    with make(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
        connection.execute("DROP TABLE namespace_settings")
        connection.executescript(UP_TO_FORMAT_6)
        connection.execute("PRAGMA user_version = 5")
    connection.close()
    with open_store(tmp_path) as store:
        store.set_settings("n", OWN)
    with open_store(tmp_path) as store:
        assert store.settings("n") == OWN
