"""Whatever happens to the files: a miss, counted and logged, never a wrong answer."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.documents.disk.page_files import DocumentFiles
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import ALIGN, FIXED_BYTES
from sglang_ext.documents.tier_store import TierStore
from tests.campaigns.troubles import few_descriptors
from tests.conftest import EXHAUSTIVE
from tests.unit.documents.document_samples import (
    SHAPE,
    Sample,
    bytes_under,
    files_of,
    flushed,
    in_child,
    kill_writer,
    look_up,
    opened,
    whole_documents,
)

PAGE = SHAPE.page_bytes


def _stored(folder: Path, document: Sample) -> Path:
    """The file of a document that a server before us wrote."""
    with opened(folder) as store:
        document.put(store)
        flushed(store)
    return next(path for path in files_of(folder) if path.stem == document.key)


def _miss(store: TierStore, document: Sample) -> None:
    """Neither found nor loaded; put again, it is there."""
    if document.found(store) is not None:
        assert not document.load_and_check(store)
    assert document.found(store) is None
    store.check_integrity()
    document.put(store)
    flushed(store)
    store.drop_host()
    assert document.load_and_check(store)
    assert store.verify().ok


def _flip(path: Path, offset: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        pytest.param(0, "magic", id="magic"),
        pytest.param(8, "version", id="version"),
        pytest.param(12, "record", id="record-length"),
        pytest.param(16, "record", id="record-crc"),
        pytest.param(24, "record", id="fingerprint"),
        pytest.param(56, "record", id="key"),
        pytest.param(112, "record", id="token-count"),
        pytest.param(116, "record", id="page-count"),
        pytest.param(FIXED_BYTES, "record", id="page-crcs"),
        pytest.param(FIXED_BYTES + 4 * 5, "record", id="token-ids"),
        pytest.param(FIXED_BYTES + 4 * 5 + 4 * 18, "record", id="namespace"),
        pytest.param(ALIGN - 1, "record", id="padding"),
        pytest.param(ALIGN, "crc", id="first-page"),
        pytest.param(ALIGN + 3 * PAGE - 1, "crc", id="third-page"),
        pytest.param(ALIGN + 5 * PAGE - 1, "crc", id="last-byte"),
    ],
)
def test_a_flipped_bit_anywhere_is_a_miss(
    tmp_path: Path, offset: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    document, other = Sample(1, 18), Sample(2, 18)
    other_path = _stored(tmp_path, other)
    path = _stored(tmp_path, document)
    _flip(path, offset)
    with opened(tmp_path) as store, caplog.at_level(logging.WARNING):
        report = store.verify()
        assert [(bad.key, bad.reason.split(":")[0]) for bad in report.bad] == [(document.key, reason)]
        _miss(store, document)
        assert store.stat()["faults"] == {reason: 1}
        assert f"document cache, {reason}" in caplog.text
        assert other_path.exists()
        assert other.load_and_check(store)


@pytest.mark.parametrize(
    "length", [0, 7, FIXED_BYTES, ALIGN - 1, ALIGN, ALIGN + PAGE, ALIGN + 5 * PAGE - 1, ALIGN + 5 * PAGE + 1]
)
def test_a_file_of_the_wrong_length_is_a_miss(tmp_path: Path, length: int) -> None:
    document = Sample(1, 18)
    path = _stored(tmp_path, document)
    path.write_bytes((path.read_bytes() + b"\0")[:length])
    with opened(tmp_path) as store:
        assert not store.verify().ok
        _miss(store, document)
        assert sum(store.stat()["faults"].values()) == 1


def test_damage_after_the_record_was_read_is_a_miss(tmp_path: Path) -> None:
    document = Sample(1, 18)
    for damage in ("flip", "truncate", "delete"):
        path = _stored(tmp_path, document)
        with opened(tmp_path) as store:
            assert document.found(store) is not None
            if damage == "flip":
                _flip(path, ALIGN + PAGE)
            elif damage == "truncate":
                os.truncate(path, ALIGN + PAGE)
            else:
                path.unlink()
            store.pin(document.key)
            ticket = store.load(document.key)
            assert ticket.wait(240)
            assert not ticket.ok
            assert ticket.reason == {"flip": "crc", "truncate": "unreadable", "delete": "missing"}[damage]
            store.unpin(document.key)
            assert sum(store.stat()["faults"].values()) == 1
            _miss(store, document)


def _foreign(**sample: object) -> Callable[[Path, Path], None]:
    def replace(path: Path, elsewhere: Path) -> None:
        other = Sample(1, 18, **sample)  # type: ignore[arg-type]
        with opened(elsewhere, fingerprint=other.meta.fingerprint) as store:
            other.put(store)
            flushed(store)
        shutil.copy(files_of(elsewhere)[0], path)

    return replace


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        pytest.param(_foreign(fingerprint="model-b"), "fingerprint", id="another-model"),
        pytest.param(_foreign(namespace="theirs"), "key", id="another-document"),
    ],
)
def test_a_foreign_file_in_a_documents_place_is_a_miss(
    tmp_path: Path, replace: Callable[[Path, Path], None], reason: str
) -> None:
    document = Sample(1, 18)
    path = _stored(tmp_path / "ours", document)
    replace(path, tmp_path / "elsewhere")
    with opened(tmp_path / "ours") as store:
        _miss(store, document)
        assert store.stat()["faults"] == {reason: 1}


def test_a_document_moved_into_another_namespace_is_a_miss(tmp_path: Path) -> None:
    document = Sample(1, 18, namespace="mine")
    path = _stored(tmp_path, document)
    (path.parent.parent / "theirs").mkdir()
    path.rename(path.parent.parent / "theirs" / path.name)
    with opened(tmp_path) as store:
        flushed(store)
        assert look_up(store, document.key, document.ids, "theirs") is None
        assert store.stat()["faults"] == {"namespace": 1}
        assert files_of(tmp_path) == []


def test_exchanged_pages_of_one_document_are_a_miss(tmp_path: Path) -> None:
    document = Sample(1, 18)
    path = _stored(tmp_path, document)
    data = path.read_bytes()
    first, second = data[ALIGN : ALIGN + PAGE], data[ALIGN + PAGE : ALIGN + 2 * PAGE]
    path.write_bytes(data[:ALIGN] + second + first + data[ALIGN + 2 * PAGE :])
    with opened(tmp_path) as store:
        _miss(store, document)
        assert store.stat()["faults"] == {"crc": 1}


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    document = Sample(1, 18)
    path = _stored(tmp_path, document)
    strangers = [path.parent / "notes.txt", path.parent / "not a key!.pages", path.parent.parent / "file"]
    for stranger in strangers:
        stranger.write_text("hello")
    with opened(tmp_path) as store:
        flushed(store)
        assert store.stat()["disk"]["documents"] == 1
        assert document.load_and_check(store)
    assert all(stranger.exists() for stranger in strangers)


def test_a_folder_that_disappears_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    document, other = Sample(1, 18), Sample(2, 18)
    folder = tmp_path / "kv"
    with opened(folder) as store:
        document.put(store)
        flushed(store)
        store.drop_host()
        shutil.rmtree(folder)
        _miss(store, document)
        other.put(store)
        flushed(store)
        assert len(files_of(folder)) == 2
    with opened(folder) as store:
        assert document.load_and_check(store)


def test_an_unwritable_place_keeps_documents_off_the_disk_only(tmp_path: Path) -> None:
    document = Sample(1, 18)
    with opened(tmp_path) as store:
        flushed(store)
        (tmp_path / "rank-0-of-1" / document.namespace).write_text("a file where the folder should be")
        document.put(store)
        flushed(store)
        assert store.stat()["faults"] == {"io": 1}
        assert store.stat()["disk"]["bytes"] == 0
        document.assert_pages(store)
        store.drop_host()
        assert document.found(store) is None


def test_leftovers_of_a_killed_writer_are_swept(tmp_path: Path) -> None:
    document = Sample(1, 18)
    path = _stored(tmp_path, document)
    left = path.parent.parent / ".tmp" / "left.1.1"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"x" * 1000)
    with opened(tmp_path) as store:
        flushed(store)
        assert not left.exists()
        assert store.stat()["disk"]["bytes"] == path.stat().st_size


def test_a_full_disk_is_counted_and_the_document_is_only_on_host(tmp_path: Path) -> None:
    """The largest file a process may write stands for the disk's end: the write fails in the middle."""
    small, large = Sample(1, 8), Sample(2, 40)

    def work(writing: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGN + 4 * PAGE, ALIGN + 4 * PAGE))
        with opened(tmp_path) as store:
            for document in (small, large):
                document.put(store)
            flushed(store)
            figures = store.stat()
            assert figures["faults"] == {"disk_full": 1}
            assert figures["disk"]["documents"] == 1
            assert figures["disk"]["bytes"] == bytes_under(tmp_path) == ALIGN + 2 * PAGE
            large.assert_pages(store)
            store.drop_host()
            assert large.found(store) is None
            assert small.load_and_check(store)
        os.write(writing, b"done")

    pid, reading = in_child(work)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    assert (said, os.waitpid(pid, 0)[1]) == (b"done", 0)


@pytest.mark.parametrize("again", [False, True], ids=["record known", "record on disk"])
def test_a_file_that_no_descriptor_is_left_for_is_served_later(tmp_path: Path, again: bool) -> None:
    """Its document is not forgotten: nothing is wrong with the file."""
    document = Sample(1, 18)
    _stored(tmp_path, document)
    with opened(tmp_path) as store:
        assert again or document.found(store) is not None
        with few_descriptors(0):
            if again:
                assert document.found(store) is None
            else:
                assert not document.load_and_check(store)
        assert document.load_and_check(store)


def test_a_writer_killed_at_any_moment_leaves_whole_documents_or_none(tmp_path: Path) -> None:
    chance = random.Random(7)
    whole, killed, times = 0, 0, 100 if EXHAUSTIVE else 12
    deadline = time.monotonic() + 240
    while killed < times or not whole:
        assert time.monotonic() < deadline, "nothing was ever whole"
        kill_writer(tmp_path, chance.uniform(0, 0.04) * (1 + killed // times))  # a slow machine gets longer
        whole += whole_documents(tmp_path)
        killed += 1


def test_removed_stays_removed_when_killed_right_after(tmp_path: Path) -> None:
    document = Sample(1, 18)

    def work(writing: int) -> None:
        with opened(tmp_path) as store:
            document.put(store)
            store.remove(document.key)  # while it is being written, more often than not
            os.write(writing, b"r")
            signal.pause()

    for _ in range(10):
        pid, reading = in_child(work)
        assert os.read(reading, 1) == b"r"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        assert files_of(tmp_path) == []
    with opened(tmp_path) as store:
        assert document.found(store) is None


def test_faults_are_logged_once_a_minute_and_always_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = [Sample(i, 18) for i in range(5)]
    for document in documents:
        _flip(_stored(tmp_path, document), ALIGN)
    with opened(tmp_path) as store, caplog.at_level(logging.WARNING):
        for document in documents:
            assert not document.load_and_check(store)
        assert store.stat()["faults"] == {"crc": 5}
    assert caplog.text.count("document cache, crc") == 1
    # a new format needs its own place or a new version, so that old files stay misses
    assert (page_format.OLDEST, page_format.VERSION) == (3, 4)


def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Sample(number, 16) for number in range(4)]
    write, full = DocumentFiles.write, True

    def failing(files: DocumentFiles, *args: Any, **kwargs: Any) -> bool:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(files, *args, **kwargs)

    monkeypatch.setattr(DocumentFiles, "write", failing)
    with opened(tmp_path) as store:
        for document in documents[:3]:
            document.put(store)
        flushed(store)
        assert store.stat()["faults"] == {"disk_full": 3}
        assert files_of(tmp_path) == []
        assert store.remove(documents[2].key)
        full = False
        documents[3].put(store)
        flushed(store)
        left = {documents[number].key for number in (0, 1, 3)}
        assert {path.stem for path in files_of(tmp_path)} == left, "all but the one that was removed"
        assert store.stat()["faults"] == {"disk_full": 3}


def test_a_document_that_never_fits_the_disk_is_tried_once_for_each_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, write = Sample(1, 16), DocumentFiles.write

    def failing(files: DocumentFiles, namespace: str, key: str, *args: Any, **kwargs: Any) -> bool:
        if key == large.key:
            raise OSError(errno.EFBIG, "File too large")
        return write(files, namespace, key, *args, **kwargs)

    monkeypatch.setattr(DocumentFiles, "write", failing)
    with opened(tmp_path) as store:
        for number in range(1, 5):
            Sample(number, 16).put(store)
            flushed(store)
        assert store.stat()["faults"] == {"disk_full": 4}
        assert store.stat()["dropped_writes"] == 0
        store.drop_host()
        Sample(5, 16).put(store)
        flushed(store)
        assert store.stat()["dropped_writes"] == 1, "the host has evicted it meanwhile"


def test_a_copy_aside_that_a_full_disk_did_not_take_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(files: DocumentFiles, *args: Any, **kwargs: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DocumentFiles, "write", failing)
    with opened(tmp_path, host_pages=2) as store:
        Sample(1, 16).put(store)
        flushed(store)
        assert store.stat()["dropped_writes"] == 1
