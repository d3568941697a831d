"""Summaries live and die with their documents, in every tier and backend."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.documents.disk import folder
from sglang_ext.documents.disk.disk import FileTier
from sglang_ext.documents.disk.page_files import DocumentFiles
from sglang_ext.documents.pages.page_format import Record
from sglang_ext.documents.pages.types import DiskConfig
from sglang_ext.documents.tier_store import TierStore
from tests.unit.documents.document_samples import FINGERPRINT, LARGE, SHAPE, Sample, files_of, flushed, opened

SUMMARY = bytes(range(256)) * 5


def summary_of(store: TierStore, key: str) -> bytes | None:
    ticket = store.summary(key)
    deadline = time.monotonic() + 240
    while not ticket.done() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert ticket.done()
    return ticket.data


@pytest.mark.parametrize("late", [False, True], ids=["with its pages", "later"])
def test_a_summary_survives_a_restart_and_reads_no_page(tmp_path: Path, late: bool) -> None:
    document, other = Sample(1, 30), Sample(2, 30)
    with opened(tmp_path) as store:
        store.put(document.meta, document.k, document.v, b"" if late else SUMMARY)
        other.put(store)
        if late:
            flushed(store)
            assert summary_of(store, document.key) is None
            assert store.put_summary(document.key, SUMMARY)
        flushed(store)
        assert summary_of(store, document.key) == SUMMARY
        assert store.stat()["host"]["metadata_bytes"] > len(SUMMARY)
    with opened(tmp_path) as store:
        assert document.found(store)
        assert summary_of(store, document.key) == SUMMARY
        assert summary_of(store, other.key) is None
        assert store.stat()["moved_bytes"]["from_disk"] == 0
        assert document.load_and_check(store)
        assert store.verify().ok
        flushed(store)
        assert store.stat()["disk"]["bytes"] == sum(path.stat().st_size for path in files_of(tmp_path))


def test_a_summary_that_comes_while_its_document_is_written_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Sample(1, 30)
    with opened(tmp_path) as store:
        write = FileTier.write

        def slowly(tier: FileTier, *args: Any) -> bool:
            assert store.put_summary(document.key, SUMMARY), "what goes to disk was put together without it"
            return write(tier, *args)

        monkeypatch.setattr(FileTier, "write", slowly)
        document.put(store)
        flushed(store)
        store.drop_host()
        assert summary_of(store, document.key) == SUMMARY
        assert document.load_and_check(store)


def test_a_damaged_summary_is_none_and_the_document_stays(tmp_path: Path) -> None:
    document = Sample(1, 30)
    with opened(tmp_path) as store:
        store.put(document.meta, document.k, document.v, SUMMARY)
        flushed(store)
    path = files_of(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with opened(tmp_path) as store:
        assert summary_of(store, document.key) is None
        assert store.stat()["faults"] == {"crc": 1}
        assert document.load_and_check(store)
        assert not store.verify().ok
    path.write_bytes(data[:-1])
    with opened(tmp_path) as store:
        assert document.found(store) is None
        assert store.stat()["faults"] == {"truncated": 1}


@pytest.mark.parametrize("config", [{}, {"backend": "sglang-file"}], ids=["files", "backend"])
def test_the_newest_summary_is_the_one_stored(tmp_path: Path, config: dict[str, Any]) -> None:
    document = Sample(1, 30)
    summaries = [SUMMARY, SUMMARY[::-1], SUMMARY[:700], SUMMARY * 2]
    with opened(tmp_path, **config) as store:
        store.put(document.meta, document.k, document.v, summaries[0])
        flushed(store)
        store.put(document.meta, document.k, document.v, summaries[1])
        for summary in summaries[2:]:
            assert store.put_summary(document.key, summary)
        flushed(store)
    with opened(tmp_path, **config) as store:
        assert document.found(store)
        assert summary_of(store, document.key) == summaries[-1]
        assert document.load_and_check(store)
        assert store.verify().ok


def test_a_document_whose_summary_cannot_be_written_is_not_taken_for_one_being_written(
    tmp_path: Path,
) -> None:
    document = Sample(1, 30)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        files_of(tmp_path)[0].unlink()  # behind the store's back
        store.put_summary(document.key, SUMMARY)
        flushed(store)
        assert isinstance(store._tiers.disk, FileTier)
        assert not store._tiers.disk.files.remove("default", document.key), "nothing to remove or cancel"


def test_removed_means_the_summary_too(tmp_path: Path) -> None:
    document = Sample(1, 30)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        store.put_summary(document.key, SUMMARY)
        assert store.remove(document.key)  # perhaps while its file is written anew
        flushed(store)
        assert summary_of(store, document.key) is None
        assert not store.put_summary(document.key, SUMMARY)
        assert files_of(tmp_path) == []
    with opened(tmp_path) as store:
        assert document.found(store) is None


def test_without_room_on_host_it_goes_to_disk_with_its_document(tmp_path: Path) -> None:
    document = Sample(1, 30)
    with opened(tmp_path, host_pages=2) as store:
        store.put(document.meta, document.k, document.v, SUMMARY)
        flushed(store)
        assert summary_of(store, document.key) == SUMMARY


def test_a_disk_too_small_for_the_summary_keeps_the_document(tmp_path: Path) -> None:
    document = Sample(1, 30)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        size = store.stat()["disk"]["bytes"]
        store.set_budget(disk_bytes=size + 100)
        store.put_summary(document.key, SUMMARY)
        flushed(store)
        assert store.stat()["disk"]["bytes"] <= size + 100
        assert summary_of(store, document.key) == SUMMARY, "from host"
        assert document.found(store)


@pytest.mark.parametrize("backend", ["sglang-file", "dynamic"])
def test_other_backends_keep_summaries(tmp_path: Path, backend: str) -> None:
    pool = {
        "backend_name": "pool",
        "module_path": "tests.unit.documents.storage_by_pool",
        "class_name": "PoolStorage",
        "interface_v1": 1,
    }
    config: dict[str, Any] = {"path": tmp_path} if backend == "sglang-file" else {"path": None, "extra": pool}

    def store() -> TierStore:
        disk = DiskConfig(backend=backend, queue_bytes=LARGE, **config)
        return TierStore(
            SHAPE, fingerprint=FINGERPRINT, host_bytes=100 * SHAPE.page_bytes, disk=disk, pin=False
        )

    documents = [Sample(1, 30), Sample(2, 18)]
    first = store()
    first.put(documents[0].meta, documents[0].k, documents[0].v, SUMMARY)
    documents[1].put(first)
    flushed(first)
    first.put_summary(documents[1].key, SUMMARY[:700])
    flushed(first)
    first.close()
    again = store()
    for document, summary in zip(documents, (SUMMARY, SUMMARY[:700]), strict=True):
        assert document.found(again)
        assert summary_of(again, document.key) == summary
        assert document.load_and_check(again)
    assert again.remove(documents[0].key)
    assert summary_of(again, documents[0].key) is None
    assert again.verify().ok
    again.clear()
    again.close()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[TierStore]:
    """Stores of which the next summary to be read is replaced by another just before."""
    stores: list[TierStore] = []
    read = DocumentFiles.read_summary

    def late(files: DocumentFiles, record: Record) -> bytes:
        if stores:
            store = stores.pop()
            assert store.put_summary(record.key, SUMMARY[::-1])
            until = time.monotonic() + 240
            while files.read_record(record.namespace, record.key, None) == record:
                assert time.monotonic() < until
                time.sleep(0.001)
        return read(files, record)

    monkeypatch.setattr(DocumentFiles, "read_summary", late)
    return stores


def test_a_summary_that_is_replaced_while_it_is_read_is_no_fault(
    tmp_path: Path, replaced: list[TierStore]
) -> None:
    document = Sample(1, 30)
    with opened(tmp_path) as store:
        store.put(document.meta, document.k, document.v, SUMMARY)
        flushed(store)
        store.drop_host()
        replaced.append(store)
        assert summary_of(store, document.key) == SUMMARY[::-1]
        assert not store.stat()["faults"]


@pytest.mark.parametrize("offline", [False, True])
def test_a_document_whose_summary_is_replaced_while_it_is_verified_is_good(
    tmp_path: Path, replaced: list[TierStore], offline: bool
) -> None:
    document = Sample(1, 30)
    with opened(tmp_path) as store:
        store.put(document.meta, document.k, document.v, SUMMARY)
        flushed(store)
        replaced.append(store)
        report = folder.verify(tmp_path) if offline else store.verify()
        assert (report.bad, report.documents) == ([], 1)
