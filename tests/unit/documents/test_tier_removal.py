"""Removed documents are gone from every tier, and namespaces are apart."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from sglang_ext.documents.disk import page_files
from sglang_ext.documents.disk.disk import FileTier
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.types import DocumentMeta
from sglang_ext.wire.own_names import own_name
from tests.unit.documents.document_samples import (
    FINGERPRINT,
    SHAPE,
    Sample,
    bytes_under,
    files_of,
    flushed,
    look_up,
    opened,
)

PAGE = SHAPE.page_bytes
FILE_4 = page_format.ALIGN + 4 * PAGE  # a document of 4 pages


def test_removed_means_removed_from_every_tier(tmp_path: Path) -> None:
    document, other = Sample(1, 16), Sample(2, 16)
    with opened(tmp_path) as store:
        document.put(store)
        other.put(store)
        assert store.remove(document.key)  # perhaps before it was written
        flushed(store)
        assert document.found(store) is None
        assert [path.stem for path in files_of(tmp_path)] == [other.key]
        document.put(store)
        flushed(store)
        store.drop_host()
        assert store.remove(document.key)
        assert not store.remove(document.key)
        assert len(files_of(tmp_path)) == 1
    with opened(tmp_path) as store:
        assert document.found(store) is None
        assert store.remove(other.key)  # before or after the scan has seen it
        assert files_of(tmp_path) == []


def test_documents_of_a_measurement_that_was_killed_go_at_the_next_start(tmp_path: Path) -> None:
    users = [Sample(1, 16), Sample(2, 16, namespace="calibration"), Sample(3, 16, namespace="calibration-1")]
    own = [Sample(number, 16, namespace=own_name("calibration")) for number in (4, 5)]
    with opened(tmp_path) as store:
        for document in (*users, *own):
            document.put(store)
        flushed(store)
        assert len(files_of(tmp_path)) == 5, "its own process measures with them"
    with opened(tmp_path) as store:
        here = Sample(6, 16, namespace=own_name("calibration"))
        here.put(store)
        flushed(store)
        kept = {document.key for document in (*users, here)}
        assert {path.stem for path in files_of(tmp_path)} == kept
        assert store.stat()["disk"]["documents"] == 4
        assert here.found(store) is not None
        store.check_integrity()


def test_a_pinned_document_is_readable_until_unpinned_but_found_by_nobody(tmp_path: Path) -> None:
    document = Sample(1, 16)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        store.pin(document.key)
        assert store.remove(document.key)
        assert document.found(store) is None
        assert store.load(document.key).reason == "unknown"
        with pytest.raises(KeyError):
            store.pin(document.key)
        document.assert_pages(store)
        store.check_integrity()
        document.put(store)  # the same text comes back while the old pages are read
        assert document.found(store) is not None
        flushed(store)
        assert store.remove(document.key)
        store.unpin(document.key)
        assert store.stat()["host"]["pages"] == 0
        store.check_integrity()


def test_namespaces_never_see_each_other(tmp_path: Path) -> None:
    mine, theirs = Sample(1, 16, namespace="mine"), Sample(1, 16, namespace="theirs")
    assert list(mine.ids) == list(theirs.ids)
    assert mine.key != theirs.key
    with opened(tmp_path) as store:
        mine.put(store)
        flushed(store)
        assert theirs.found(store) is None
        for dropped in (False, True):
            if dropped:
                store.drop_host()
            assert look_up(store, mine.key, mine.ids, "theirs") is None  # even with the right key
            assert mine.found(store) is not None
        theirs.put(store)
        flushed(store)
        assert [path.stem for path in files_of(tmp_path) if path.parent.name == "theirs"] == [theirs.key]
        assert store.stat()["disk"]["namespaces"]["mine"] == {"documents": 1, "bytes": FILE_4, "pages": 4}
        assert store.remove_namespace("mine") == 1
        assert mine.found(store) is None
        flushed(store)
        assert [path.parent.name for path in files_of(tmp_path)] == ["theirs"]
        assert theirs.load_and_check(store)
        with pytest.raises(ValueError, match="another document"):
            store.put(DocumentMeta(theirs.key, "mine", theirs.ids, 16, FINGERPRINT), theirs.k, theirs.v)
    with opened(tmp_path) as store:
        assert store.remove_namespace("theirs") == 1
        assert theirs.found(store) is None
        flushed(store)
        assert files_of(tmp_path) == []


def test_a_document_that_must_not_last_never_reaches_the_disk(tmp_path: Path) -> None:
    document, large = Sample(1, 16), Sample(2, 200, namespace="mine")
    with opened(tmp_path, host_pages=20) as store:
        for each in (document, large):
            store.put(each.meta, each.k, each.v, to_disk=False)
        flushed(store)
        assert files_of(tmp_path) == []
        assert store.where(document.key, "default") == (True, "host")
        assert large.found(store) is None, "it has no room on host"
        store.put(document.meta, document.k, document.v)  # the same text is indexed later
        flushed(store)
        assert [path.stem for path in files_of(tmp_path)] == [document.key]
        store.put(document.meta, document.k, document.v, to_disk=False)
        assert document.load_and_check(store)


def test_an_empty_folder_does_not_keep_its_namespaces_name(tmp_path: Path) -> None:
    kept, gone = Sample(1, 16), [Sample(i, 16, namespace=f"client-{i}") for i in range(3)]
    with opened(tmp_path, disk_bytes=2 * FILE_4) as store:
        for document in (*gone, kept):
            document.put(store)
            flushed(store)
        store.remove(gone[2].key)
        names = [path.name for path in (tmp_path / "rank-0-of-1").iterdir() if path.name[0] != "."]
        assert names == ["default"], "two were evicted, one removed"
    (tmp_path / "rank-0-of-1" / "left-by-an-earlier-version").mkdir()
    with opened(tmp_path) as store:
        assert kept.found(store)
        assert not (tmp_path / "rank-0-of-1" / "left-by-an-earlier-version").exists()


def test_removals_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder that a removal changed is synced."""
    folder = tmp_path / "rank-0-of-1"
    documents = [Sample(1, 16), Sample(2, 16), Sample(3, 16, namespace="other")]
    synced, sync = [], os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    with opened(tmp_path) as store:
        for document in documents:
            document.put(store)
        flushed(store)
        monkeypatch.setattr(os, "fsync", recorded)
        store.remove(documents[0].key)
        flushed(store)
        assert folder / "default" in synced
        synced.clear()
        store.remove_namespace("other")
        flushed(store)
        assert synced == [folder]
        synced.clear()
        store.set_budget(disk_bytes=0)
        flushed(store)
        assert synced == [], "evictions need not last"


def test_clear_empties_both_tiers(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for i in range(5):
            Sample(i, 16, namespace=f"space-{i % 2}").put(store)
        store.clear()
        flushed(store)
        figures = store.stat()
        assert (figures["host"]["bytes"], figures["disk"]["bytes"]) == (0, 0)
        assert (figures["host"]["documents"], figures["disk"]["documents"]) == (0, 0)
        assert files_of(tmp_path) == []


@contextmanager
def undeletable() -> Iterator[None]:
    """A file system that has become read-only, as far as document files go."""
    unlink, rename = Path.unlink, os.rename

    def check(path: Path) -> None:
        if path.suffix == ".pages":
            raise OSError(errno.EROFS, "Read-only file system")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: check(path) or unlink(path, missing_ok))
        patch.setattr(os, "rename", lambda source, target: check(Path(source)) or rename(source, target))
        yield


def test_the_space_of_what_is_removed_is_freed_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler waits for it, and a file system takes long over a large file."""
    waited: list[str] = []
    with opened(tmp_path, disk_bytes=3 * FILE_4) as store:

        def recorded(original: Any, name: str) -> Any:
            def free(*given: Any, **options: Any) -> Any:
                if store._tiers.lock._is_owned():  # type: ignore[attr-defined]
                    waited.append(name)
                return original(*given, **options)

            return free

        monkeypatch.setattr(Path, "unlink", recorded(Path.unlink, "unlink"))
        monkeypatch.setattr(shutil, "rmtree", recorded(shutil.rmtree, "rmtree"))
        documents = [Sample(i, 16, namespace=f"space-{i % 2}") for i in range(6)]
        for document in documents:
            document.put(store)
            flushed(store)
            assert bytes_under(tmp_path) <= 3 * FILE_4
        store.remove(documents[5].key)
        store.set_budget(disk_bytes=FILE_4)
        flushed(store)
        assert bytes_under(tmp_path) == FILE_4
        store.clear()
        flushed(store)
        assert bytes_under(tmp_path) == 0
    assert waited == []


def test_what_cannot_be_deleted_is_not_found_and_deleted_later(tmp_path: Path) -> None:
    gone, back, kept = (Sample(i, 16) for i in range(3))
    with opened(tmp_path) as store:
        for document in (gone, back, kept):
            document.put(store)
        flushed(store)
        with undeletable():
            assert store.remove(gone.key)
            assert store.remove(back.key)
            flushed(store)
        assert store.stat()["faults"]["io"] >= 2
        for document in (gone, back):
            assert document.found(store) is None
            assert store.where(document.key, "default") == (False, "absent")
        assert len(files_of(tmp_path)) == 3
        assert kept.load_and_check(store)
        back.put(store)  # the same text again
        flushed(store)
        store.remove(kept.key)
        flushed(store)
        assert [path.stem for path in files_of(tmp_path)] == [back.key]
        store.drop_host()
        assert back.load_and_check(store)


def test_a_removal_while_the_file_is_written_hides_it_whatever_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Sample(1, 16)
    begun, go, write = Event(), Event(), FileTier.write

    def held(*given: Any) -> bool:
        begun.set()
        return go.wait(240) and write(*given)

    monkeypatch.setattr(FileTier, "write", held)
    with opened(tmp_path) as store:
        document.put(store)
        assert begun.wait(240)
        try:
            with undeletable():
                assert store.remove(document.key)
            found = document.found(store)
        finally:
            go.set()
        assert found is None
        flushed(store)
        assert document.found(store) is None
        assert store.stat()["host"]["pages"] == 0
        document.put(store)
        flushed(store)
        store.drop_host()
        assert document.load_and_check(store)


def test_the_scan_at_the_start_finds_nothing_that_could_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, other = Sample(1, 16), Sample(2, 16)
    with opened(tmp_path) as store:
        document.put(store)
        other.put(store)
        flushed(store)
    go, scan = Event(), FileTier.scan
    monkeypatch.setattr(FileTier, "scan", lambda tier, *args: scan(tier, *args) if go.wait(240) else iter(()))
    with opened(tmp_path) as store, undeletable():
        try:
            assert store.remove(document.key, "default")
        finally:
            go.set()
        flushed(store)
        assert document.found(store) is None
        assert store.stat()["disk"]["documents"] == 1
    assert [path.stem for path in files_of(tmp_path)] == [other.key], "deleted when the store was closed"


@contextmanager
def unreadable(call: str, part: str) -> Iterator[None]:
    """Let ``os.scandir``, ``os.stat`` or ``open`` of paths with this part fail, as those of a bad disk do."""
    owner: Any = page_files if call == "open" else os
    with pytest.MonkeyPatch.context() as patch:
        real = getattr(owner, call, open)

        def failing(path: Any, *args: Any, **kwargs: Any) -> Any:
            if part in str(path):
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *args, **kwargs)

        patch.setattr(owner, call, failing, raising=False)
        yield


@pytest.mark.parametrize(
    ("call", "part"), [("scandir", "/theirs"), ("stat", "/theirs/")], ids=["folder", "file"]
)
def test_what_the_scan_cannot_list_hides_no_other_document_from_a_removal(
    tmp_path: Path, call: str, part: str
) -> None:
    mine, theirs = Sample(1, 16, namespace="mine"), Sample(2, 16, namespace="theirs")
    with opened(tmp_path) as store:
        mine.put(store)
        theirs.put(store)
        flushed(store)
    with ExitStack() as stack:
        with unreadable(call, part):
            store = stack.enter_context(opened(tmp_path))
            flushed(store)
        figures = store.stat()
        assert (figures["disk"]["documents"], figures["disk"]["scanned"]) == (1, True)
        assert figures["faults"] == {"io": 1}
        assert store.remove(mine.key)
        assert [path.stem for path in files_of(tmp_path)] == [theirs.key]
    with opened(tmp_path) as store:
        flushed(store)
        assert store.stat()["disk"]["scanned"]


def test_a_document_that_the_scan_has_not_listed_is_removed_from_its_namespace(tmp_path: Path) -> None:
    documents = [Sample(number, 16, namespace="theirs") for number in (1, 2, 3)]
    with opened(tmp_path) as store:
        for document in documents:
            document.put(store)
        flushed(store)
    with ExitStack() as stack:
        with unreadable("scandir", "/theirs"):
            store = stack.enter_context(opened(tmp_path))
            flushed(store)
            assert store.remove(documents[0].key, "theirs")
        with unreadable("stat", documents[1].key):
            store.remove(documents[1].key, "theirs")
        assert documents[0].found(store) is documents[1].found(store) is None
        assert [path.stem for path in files_of(tmp_path)] == [documents[2].key]
        with unreadable("scandir", "/theirs"), unreadable("listdir", "/theirs"):
            store.remove_namespace("theirs")
        assert files_of(tmp_path) == []
        assert documents[2].found(store) is None


def test_a_namespace_that_cannot_be_removed_keeps_no_other(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number, namespace in enumerate(("a", "b")):
            Sample(number, 16, namespace=namespace).put(store)
        flushed(store)
    with ExitStack() as stack:
        with unreadable("scandir", "rank-0-of-1/"):
            store = stack.enter_context(opened(tmp_path))
            flushed(store)
        with unreadable("rename", "rank-0-of-1/a"), unreadable("scandir", "rank-0-of-1/"):
            store.clear()
        assert [path.parent.name for path in files_of(tmp_path)] == ["a"]


def test_a_namespace_is_moved_aside_by_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler waits for it, however many documents there are."""
    documents = [Sample(number, 16, namespace=f"space-{number % 2}") for number in range(20)]
    alone = Sample(20, 16, namespace="space-0")
    moved, discard = [], page_files.DocumentFiles._discard

    def counted(files: page_files.DocumentFiles, path: Path) -> Path:
        moved.append(path.name)
        return discard(files, path)

    with opened(tmp_path) as store:
        for document in documents:
            document.put(store)
        store.put(alone.meta, alone.k, alone.v, to_disk=False)
        flushed(store)
        monkeypatch.setattr(page_files.DocumentFiles, "_discard", counted)
        assert store.remove_namespace("space-0") == 11
        assert moved == ["space-0"]
        assert alone.found(store) is None
        assert [document.found(store) is None for document in documents] == [True, False] * 10
        store.check_integrity()
        flushed(store)
        assert len(files_of(tmp_path)) == 10
        store.clear()
        assert moved == ["space-0", "space-1"]
        store.check_integrity()


def test_a_namespace_takes_no_file_of_another_out_of_the_accounts(tmp_path: Path) -> None:
    document, other = Sample(1, 16, namespace="mine"), Sample(2, 16, namespace="theirs")
    with opened(tmp_path) as store:
        document.put(store)
        other.put(store)
        flushed(store)
        mine, theirs = sorted(files_of(tmp_path), key=lambda path: path.parent.name)
        shutil.copy(mine, theirs.parent)
        store.remove_namespace("theirs")
        flushed(store)
        assert len(files_of(tmp_path)) == store.stat()["disk"]["documents"]


def test_a_removal_of_what_is_nowhere_is_no_failure_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(page_files.DocumentFiles, "_discard", full)
        assert not store.remove(Sample(1, 16).key, "notes")
        assert store.stat()["faults"] == {}
