"""Asking where a document is, and what room there is."""

from __future__ import annotations

from pathlib import Path

from tests.unit.documents.document_samples import Sample, flushed, opened


def test_where_a_document_is_without_using_it(tmp_path: Path) -> None:
    first, second = Sample(1, 40), Sample(2, 40)
    with opened(tmp_path, host_pages=12) as store:
        assert store.where(first.key, first.namespace) == (False, "absent")
        first.put(store)
        flushed(store)
        assert store.where(first.key, first.namespace) == (True, "disk")
        assert store.where(first.key, "another") == (False, "absent")
        hits = store.stat()["hits"]
        second.put(store)  # twelve pages on host hold one of the two, ten each
        flushed(store)
        assert store.where(first.key, first.namespace) == (False, "disk")
        assert store.where(second.key, second.namespace) == (True, "disk")
        assert store.stat()["hits"] == hits
        room = store.room()
        assert (room["lasting"], room["queued_bytes"], room["faults"]) == ("disk", 0, {})
    with opened(None) as store:
        first.put(store)
        assert store.where(first.key, first.namespace) == (True, "host")
        assert store.room()["lasting"] == "host"


def test_what_the_tiers_hold_in_the_order_of_use(tmp_path: Path) -> None:
    first, second = Sample(1, 40), Sample(2, 40)
    with opened(tmp_path, host_pages=12) as store:
        for sample in (first, second):  # twelve pages on host hold one of the two
            sample.put(store)
            flushed(store)
        held = store.held()
        assert held["host"] == {second.key: 40}
        assert list(held["disk"]) == [first.key, second.key]
        assert min(held["disk"].values()) >= 40, "whole pages and their metadata"
        assert held["host_room"] == 12 * store.shape.block
        assert held["scanned"]
        store.remove(second.key, second.namespace)
        assert (list(store.held()["host"]), list(store.held()["disk"])) == ([], [first.key])
    with opened(None) as store:
        first.put(store)
        assert store.held()["disk"] == {}
