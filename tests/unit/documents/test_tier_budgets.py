"""Every tier keeps its budget, and evicts the least recently used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_ext.documents.pages import page_format
from tests.unit.documents.document_samples import (
    SHAPE,
    Sample,
    bytes_under,
    files_of,
    flushed,
    opened,
)

PAGE = SHAPE.page_bytes
FILE_4 = page_format.ALIGN + 4 * PAGE  # a document of 4 pages


def test_least_recently_used_documents_leave_host_first_and_pinned_ones_stay() -> None:
    documents = [Sample(i, 16) for i in range(4)]
    with opened(None, host_pages=12) as store:
        for document in documents[:3]:
            document.put(store)
        documents[0].found(store)
        store.pin(documents[1].key)
        documents[3].put(store)
        assert [document.found(store) is not None for document in documents] == [True, True, False, True]
        store.set_budget(host_bytes=0)
        assert [document.found(store) is not None for document in documents] == [False, True, False, False]
        documents[1].assert_pages(store)
        store.check_integrity()
        store.unpin(documents[1].key)
        assert store.stat()["host"]["bytes"] == 0
        assert store.stat()["evictions"]["host"] == 4
        with pytest.raises(KeyError):
            store.unpin(documents[1].key)
        with pytest.raises(KeyError):
            store.pin("unknown")
        with pytest.raises(ValueError, match="restart"):
            store.set_budget(host_bytes=13 * PAGE)
        store.check_integrity()


def test_a_load_without_room_fails_and_evicts_nothing(tmp_path: Path) -> None:
    small, large = Sample(1, 16), Sample(2, 40)
    with opened(tmp_path, host_pages=10) as store:
        large.put(store)
        flushed(store)
        small.put(store)
        flushed(store)
        store.pin(small.key)
        ticket = store.load(large.key)
        assert (ticket.done(), ticket.ok, ticket.reason) == (True, False, "no_room")
        assert store.load(large.key, [0, 1]).wait(240)
        large.assert_pages(store, [0, 1])
        assert store.load("unknown").reason == "unknown"
        store.check_integrity()


def test_without_room_on_host_a_document_goes_to_disk_only(tmp_path: Path) -> None:
    pinned, document = Sample(1, 16), Sample(2, 10)
    with opened(tmp_path, host_pages=4) as store:
        pinned.put(store)
        store.pin(pinned.key)
        document.put(store)
        flushed(store)
        resident = document.resident(store)
        assert resident.on_disk
        assert not resident.blocks_on_host.any()
        store.unpin(pinned.key)
        assert document.load_and_check(store)
    with opened(tmp_path, host_pages=0) as store:
        assert document.found(store) is not None
        assert store.load(document.key).reason == "no_room"
        third = Sample(3, 10)
        third.put(store)
        flushed(store)
        assert third.found(store) is not None


def test_the_disk_keeps_its_budget_and_the_most_recently_used(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(6)]
    with opened(tmp_path, disk_bytes=4 * FILE_4 + 100) as store:
        for document in documents[:4]:
            document.put(store)
            flushed(store)
        store.drop_host()
        documents[0].found(store)
        for document in documents[4:]:
            document.put(store)
            flushed(store)
            assert bytes_under(tmp_path) <= 4 * FILE_4 + 100
        store.drop_host()
        assert [document.found(store) is not None for document in documents] == [
            True,
            False,
            False,
            True,
            True,
            True,
        ]
        assert store.stat()["evictions"]["disk"] == 2
        store.set_budget(disk_bytes=FILE_4)
        assert len(files_of(tmp_path)) == 1
        store.check_integrity()
    with opened(tmp_path, disk_bytes=FILE_4 - 1) as store:  # a smaller budget after a restart
        flushed(store)
        assert files_of(tmp_path) == []
        documents[0].put(store)
        flushed(store)
        assert store.stat()["faults"] == {"too_large": 1}
        assert documents[0].resident(store).blocks_on_host.all()


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(3)]
    with opened(tmp_path) as store:
        for document in documents:
            document.put(store)
        flushed(store)
    for age, index in enumerate((1, 0, 2)):
        path = next(path for path in files_of(tmp_path) if path.stem == documents[index].key)
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    with opened(tmp_path, disk_bytes=FILE_4) as store:
        flushed(store)
        assert [document.found(store) is not None for document in documents] == [False, True, False]


def test_a_full_queue_makes_documents_wait_on_host_not_the_caller(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(20)]
    with opened(tmp_path, queue_bytes=4 * PAGE) as store:
        for document in documents:
            document.put(store)
            assert store.stat()["disk"]["queued_bytes"] <= 4 * PAGE
            store.check_integrity()
        flushed(store)
        assert store.room()["write_room_bytes"] == 4 * PAGE
        assert store.stat()["dropped_writes"] == 0
    with opened(tmp_path) as store:
        assert all(document.found(store) is not None for document in documents)


def test_without_room_on_host_or_in_the_queue_a_document_is_not_kept(tmp_path: Path) -> None:
    document = Sample(1, 16)
    with opened(tmp_path, host_pages=0, queue_bytes=PAGE) as store:
        document.put(store)
        flushed(store)
        assert document.found(store) is None
        assert store.stat()["dropped_writes"] == 1
