"""Document files in a folder: finding, reading, writing and removing them. Imports neither torch nor SGLang.

    <root>/rank-0-of-1/<namespace>/<key>.pages      a document: record, pages, summary
    <root>/rank-0-of-1/.tmp/                        files being written; emptied at start
    <root>/rank-0-of-1/.trash/                      what was removed; emptied in the background
    <root>/rank-0-of-1/.owner                       locked by the process that owns this rank's folder

A document appears by one rename and disappears by one, as a namespace does: to free the space of a large file
takes a file system far longer. Whatever kills the process, a document is whole or absent, and a removed one
stays removed."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import PageError, PageLayout, Record

SUFFIX = ".pages"
_RANK = re.compile(r"rank-(\d+)-of-(\d+)")
_IOV_MAX = 512  # buffers of one preadv/pwritev; Linux allows 1024


@dataclass(frozen=True)
class PageFile:
    """A document file as listed: its size in bytes and the time of its last use."""

    namespace: str
    key: str
    size: int
    used_at: float


class DocumentFiles:
    """The document files of one tensor-parallel rank. Thread-safe."""

    def __init__(self, root: Path, *, rank: int, world: int, writer: str = "") -> None:
        """``writer``: a name of this process's own, for a folder that it shares with processes of other
        machines; by default the process id."""
        self._writer = writer or str(os.getpid())
        self.folder = root / f"rank-{rank}-of-{world}"
        self._lock = threading.Lock()  # orders a rename into place against a removal
        # (namespace, key) of documents being written -> removed meanwhile
        self._writing: dict[tuple[str, str], bool] = {}
        self._serial = 0
        self._owner: int | None = None

    # who owns the folder

    def acquire(self, timeout_s: float = 5.0) -> bool:
        """Become the folder's only owner, waiting for a stopping process; False when it stays taken. Creates
        the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / ".owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        until = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    os.close(descriptor)
                    return False
                time.sleep(0.05)
                continue
            self._owner = descriptor
            return True

    def release(self) -> None:
        """Give up the folder."""
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def sweep(self) -> None:
        """Delete what killed writers and removed namespaces left, and empty folders. Owner only."""
        for left in (*self.folder.glob(".tmp"), *self.folder.glob(".trash*")):
            shutil.rmtree(left, ignore_errors=True)
        for name in self.namespaces():
            with suppress(OSError):  # it holds documents
                (self.folder / name).rmdir()

    # finding

    def path(self, namespace: str, key: str) -> Path:
        """Path of a document's file."""
        return self.folder / namespace / f"{key}{SUFFIX}"

    def namespaces(self) -> list[str]:
        """Names of the namespaces that have a folder, sorted."""
        try:
            with os.scandir(self.folder) as entries:
                return sorted(
                    entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
                )
        except FileNotFoundError:
            return []

    def find(self, namespace: str, key: str) -> PageFile | None:
        """Look for a document by one stat of its path."""
        try:
            stat = os.stat(self.path(namespace, key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return PageFile(namespace, key, stat.st_size, stat.st_mtime)

    def scan(
        self, only: str | None = None, failed: Callable[[OSError], object] | None = None
    ) -> Iterator[PageFile]:
        """List all documents (of one namespace). A document that disappears meanwhile is left out.

        ``failed``: called for a folder or file that cannot be read, and the rest is listed; without it that
        raises OSError."""

        def note(error: OSError) -> None:
            if failed is None:
                raise error
            failed(error)

        try:
            spaces = self.namespaces() if only is None else [only]
        except OSError as error:
            note(error)
            return
        for namespace in spaces:
            try:
                with os.scandir(self.folder / namespace) as entries:
                    names = [entry.name for entry in entries if entry.name.endswith(SUFFIX)]
            except FileNotFoundError:
                continue
            except OSError as error:
                note(error)
                continue
            for name in names:
                try:
                    found = self.find(namespace, name.removesuffix(SUFFIX))
                except OSError as error:
                    note(error)
                    continue
                if found is not None:
                    yield found

    # reading

    def read_record(self, namespace: str, key: str, layout: PageLayout | None) -> Record:
        """Read a record and check it against its file. Raises PageError or OSError (FileNotFoundError: a
        plain miss)."""
        with open(self.path(namespace, key), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            data = _read_exactly(file, page_format.ALIGN)
            total = page_format.record_length(data[: page_format.FIXED_BYTES])
            if len(data) < total:
                data += _read_exactly(file, total - len(data))
        record = page_format.decode(data, layout=layout, key=key)
        if record.namespace != namespace:
            raise PageError(
                "namespace", f"a document of namespace {record.namespace!r} lies under {namespace!r}"
            )
        if size != record.file_bytes:
            raise PageError("truncated", f"{size} bytes, a whole file has {record.file_bytes}")
        return record

    def read_pages(
        self, namespace: str, key: str, page_bytes: int, blocks: Sequence[int], targets: Sequence[Any]
    ) -> int:
        """Fill each target (a writable buffer of ``page_bytes``) with its block; no other pages are read.

        Returns the bytes of pages read. Raises PageError when the file ends too early, OSError. The caller
        checks ``page_crc``."""
        done = 0
        with open(self.path(namespace, key), "rb", buffering=0) as file:
            start = page_format.record_length(_read_exactly(file, page_format.FIXED_BYTES))
            for first, count in runs(blocks):
                offset = start + blocks[first] * page_bytes
                done += _read_into(file.fileno(), targets[first : first + count], offset, page_bytes)
        return done

    def read_summary(self, record: Record) -> bytes:
        """Read the bytes behind the pages, unchecked. Raises OSError, PageError when the file ends early."""
        with open(self.path(record.namespace, record.key), "rb", buffering=0) as file:
            file.seek(record.summary_start)
            data = _read_exactly(file, record.summary_bytes)
        if len(data) < record.summary_bytes:
            raise PageError("truncated", f"the file ends {record.summary_bytes - len(data)} bytes too early")
        return data

    def replace_summary(self, old: Record, record: bytes, summary: bytes, *, fsync: bool) -> bool:
        """Rewrite the document with another record and summary and the same pages, as ``write``."""
        try:
            with (
                open(self.path(old.namespace, old.key), "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as view,
                view[old.record_bytes : old.summary_start] as pages,
            ):
                if len(pages) < old.summary_start - old.record_bytes:
                    raise PageError("truncated", "the file ends before its last page")
                return self.write(old.namespace, old.key, [record, pages, summary], fsync=fsync)
        finally:  # announced by `begin`, even where nothing could be opened
            with self._lock:
                self._writing.pop((old.namespace, old.key), None)

    # writing and removing

    def begin(self, namespace: str, key: str) -> None:
        """Announce a write: a removal from now on cancels it."""
        with self._lock:
            self._writing[namespace, key] = False

    def write(self, namespace: str, key: str, parts: Sequence[Any], *, fsync: bool) -> bool:
        """Write a document's file from its parts (buffers), atomically. Returns False when it was removed
        meanwhile; raises OSError, leaving nothing behind.
        """
        with self._lock:
            self._serial += 1
            temporary = self.folder / ".tmp" / f"{key}.{self._writer}.{self._serial}"
            self._writing.setdefault((namespace, key), False)
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                _write_all(descriptor, parts)
                if fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            final = self.path(namespace, key)
            with self._lock:
                if self._writing[namespace, key]:
                    return False
                final.parent.mkdir(parents=True, exist_ok=True)
                os.rename(temporary, final)
            if fsync:
                with suppress(FileNotFoundError):  # removed again, with its folder
                    _fsync_folder(final.parent)
            return True
        finally:
            with self._lock:
                self._writing.pop((namespace, key), None)
            with suppress(FileNotFoundError):
                temporary.unlink()

    def remove(self, namespace: str, key: str) -> bool:
        """Remove a document, cancelling a write in progress; True if there was one. ``sweep_trash`` frees the
        space. A namespace's folder goes with its last document: clients choose their names.
        """
        with self._lock:
            was_writing = self._writing.get((namespace, key)) is False  # True: removed before
            if was_writing:
                self._writing[namespace, key] = True
            path = self.path(namespace, key)
            try:
                self._discard(path)
            except (FileNotFoundError, NotADirectoryError):
                return was_writing
            except OSError:  # a full disk may have no room in the trash
                try:
                    path.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    return was_writing
            with suppress(OSError):  # it holds others
                path.parent.rmdir()
            return True

    def remove_namespace(self, namespace: str) -> list[str]:
        """Remove a namespace and return the keys removed. ``sweep_trash`` frees the space."""
        folder = self.folder / namespace
        with self._lock:
            removed = {key for (name, key), gone in self._writing.items() if name == namespace and not gone}
            for key in removed:
                self._writing[namespace, key] = True
            try:
                gone = self._discard(folder)  # first: a folder that cannot be listed is removed all the same
                removed |= {name.removesuffix(SUFFIX) for name in os.listdir(gone) if name.endswith(SUFFIX)}
            except FileNotFoundError:
                pass  # nothing of it on disk
        return sorted(removed)

    def _discard(self, path: Path) -> Path:
        """Move into the trash, and return where it is now. Under the lock: a sweep must not take the trash
        away before the move."""
        self._serial += 1
        trash = self.folder / ".trash"
        trash.mkdir(exist_ok=True)
        gone = trash / f"{path.name}.{os.getpid()}.{self._serial}"
        os.rename(path, gone)
        return gone

    def sweep_trash(self) -> None:
        """Delete what was removed."""
        with self._lock:  # what is removed from now on finds a folder of its own
            self._serial += 1
            swept = self.folder / f".trash.{self._serial}"
            try:
                os.rename(self.folder / ".trash", swept)
            except FileNotFoundError:
                return
        shutil.rmtree(swept, ignore_errors=True)

    def sync_removals(self, namespaces: Collection[str]) -> None:
        """Let removals in these namespaces survive a power cut."""
        for folder in (*(self.folder / name for name in namespaces), self.folder):
            with suppress(FileNotFoundError):  # it went with its last document
                _fsync_folder(folder)

    def touch(self, namespace: str, key: str) -> None:
        """Record a use in the file's time, so that the order of eviction survives a restart."""
        with suppress(OSError):  # the file is gone or the folder read-only: only the order suffers
            os.utime(self.path(namespace, key))


def ranks(root: Path) -> list[DocumentFiles]:
    """The files of each rank that has a folder under ``root``."""
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    matches = [match for match in map(_RANK.fullmatch, names) if match is not None]
    return [DocumentFiles(root, rank=int(match[1]), world=int(match[2])) for match in matches]


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (index of the first, count) of each run of consecutive blocks."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield start, index - start
            start = index


def _read_exactly(file: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = file.read(count - len(data))
        if not more:
            break
        data += more
    return data


def _read_into(descriptor: int, targets: Sequence[Any], offset: int, each: int) -> int:
    done, total = 0, each * len(targets)
    while done < total:
        index, within = divmod(done, each)
        views = [memoryview(target) for target in targets[index : index + _IOV_MAX]]
        views[0] = views[0][within:]
        count = os.preadv(descriptor, views, offset + done)
        if count == 0:
            raise PageError("truncated", f"the file ends {total - done} bytes too early")
        done += count
    return done


def _write_all(descriptor: int, parts: Sequence[Any]) -> None:
    pending = [memoryview(part).cast("B") for part in parts]
    while pending:
        count = os.writev(descriptor, pending[:_IOV_MAX])
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
