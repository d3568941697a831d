"""The disk tier: our own document files, or another of SGLang's storage backends (hicache.py).

Every page that comes up is checked here against the document's record and its CRC, because other backends
check nothing."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from sglang_ext.documents.disk.page_files import DocumentFiles, PageFile
from sglang_ext.documents.disk.verification import read_document
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import PageError, PageLayout, Record
from sglang_ext.documents.pages.types import DiskConfig, StoreInUse

logger = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0
NO_DESCRIPTOR = "descriptor"  # why a load failed that may succeed later


def disk_is_full(error: Exception) -> bool:
    """Return whether a write failed because there is no room for it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def lacks_descriptor(error: Exception) -> bool:
    """Return whether this process had no file descriptor left: the file may be as it should."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class Faults:
    """Counts faults by reason, reports each to ``on_count`` and logs each reason at most once a minute.

    Thread-safe."""

    def __init__(self, on_count: Callable[[str], None]) -> None:
        self._on_count = on_count
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def __call__(self, reason: str, message: str) -> None:
        now = time.monotonic()
        with self._lock:
            self.counts[reason] += 1
            quiet = now - self._logged.get(reason, -_LOG_EVERY_S) < _LOG_EVERY_S
            if not quiet:
                self._logged[reason] = now
        self._on_count(reason)
        if not quiet:
            logger.warning(
                "document cache, %s: %s (more of this kind within a minute are only counted)", reason, message
            )

    def count(self, reason: str) -> None:
        """Count a fault that is logged elsewhere."""
        with self._lock:
            self.counts[reason] += 1
        self._on_count(reason)

    def note(self, error: PageError | OSError, action: str) -> None:
        """Count a failed read under its own reason, or `io`."""
        self(error.reason if isinstance(error, PageError) else "io", f"{action}: {error}")


class DiskTier:
    """A tier without a disk: it has nothing and stores nothing. The others override it.

    Called from the store's thread (``find``, ``remove``) and from its IO threads. ``faults`` counts every
    unexpected miss."""

    has_folder = False  # True: documents can be listed, and this process enforces the budget

    def __init__(self, layout: PageLayout, faults: Faults) -> None:
        self.layout = layout
        self.faults = faults

    def find(self, key: str, namespace: str) -> Record | None:
        """The checked record; None for a miss. Raises OSError, or PageError for an unusable record."""
        return None

    def begin(self, key: str, namespace: str) -> None:
        """Announce a ``write``. Called under the store's lock, which orders it against removals."""

    def write(
        self,
        record: Record,
        data: bytes,
        pages: Sequence[torch.Tensor],
        numbers: Sequence[int] | None,
        summary: bytes,
    ) -> bool:
        """Store a document; False when it was refused, removed meanwhile or the disk failed.

        Args:
            data: The encoded record.
            pages: All pages, uint8 [page_bytes] each.
            numbers: The pages' numbers in the host pool; None when they lie outside it.
            summary: Bytes stored behind the pages; empty for none.
        """
        return False

    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        """Give a document another record and summary and keep its pages. Raises OSError or PageError."""
        return False

    def read_summary(self, record: Record) -> bytes | None:
        """The summary's bytes, unchecked; None for a miss. Raises OSError or PageError."""
        return None

    def read(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> str:
        """Fill the targets, unchecked. Returns an empty string, `missing` where the document is gone,
        `unreadable` for an error that has been counted, or `NO_DESCRIPTOR`.
        """
        return "missing"

    def verify(self, found: PageFile) -> Record:
        """Read and check a whole document. Raises PageError or OSError."""
        raise FileNotFoundError(found.key)

    def remove(self, key: str, namespace: str, record: Record | None) -> bool:
        """Return whether something was removed. Backends that delete value by value need the record. Raises
        OSError or PageError."""
        return False

    def remove_namespace(self, namespace: str) -> list[str]:
        """Remove a namespace; the keys removed, which the caller may not have known."""
        return []

    def clear(self) -> None:
        """Remove everything of this rank."""

    def sweep(self) -> None:
        """Free the space of what was removed. Slow: runs in an IO thread. Raises OSError."""

    def sync_removals(self, namespaces: Collection[str]) -> None:
        """Let removals in these namespaces survive a power cut. Slow, for an IO thread. Raises OSError."""

    def touch(self, key: str, namespace: str) -> None:
        """Record a use, so that the order of eviction survives a restart."""

    def close(self) -> None:
        """Release the folder or the connection."""

    def load_summary(self, record: Record) -> bytes | None:
        """The checked summary, or the one that has replaced it; None, and a counted fault, where it cannot be
        used."""
        while True:
            try:
                data = self.read_summary(record)
                if data is not None and page_format.summary_crc(record.key, data) != record.summary_crc:
                    raise PageError("crc", "it fails its CRC")
                return data
            except (PageError, OSError) as error:
                newer = self._newer(record)
                if newer is None:
                    self.faults.note(error, f"reading the summary of document {record.key}")
                    return None
                record = newer

    def _newer(self, record: Record) -> Record | None:
        """The record that has replaced this one, with another summary; None where none has."""
        try:
            found = self.find(record.key, record.namespace)
        except (PageError, OSError):
            return None
        return None if found == record else found

    def load(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> str:
        """Fill the targets and check every page. Returns the reason of failure, or an empty string."""
        reason = self.read(record, blocks, targets, numbers)
        if reason:
            return reason
        for block, target in zip(blocks, targets, strict=True):
            if page_format.page_crc(record.key, block, target.numpy()) != record.crcs[block]:
                self.faults("crc", f"page {block} of document {record.key} fails its CRC")
                return "crc"
        return ""


class FileTier(DiskTier):
    """Our own document files, the default. Every file is found, counted and removed by its path."""

    has_folder = True

    def __init__(self, config: DiskConfig, layout: PageLayout, faults: Faults) -> None:
        """Take the rank's folder. Raises StoreInUse when another process owns it."""
        super().__init__(layout, faults)
        self.files = DocumentFiles(Path(str(config.path)), rank=layout.rank, world=layout.world)
        self._fsync = config.fsync == "document"
        self.bytes_read = 0  # of pages, over all loads
        if not self.files.acquire():
            raise StoreInUse(
                f"the document folder {config.path} is used by another server: "
                "give each its own, or stop the other one"
            )
        self.files.sweep()

    def find(self, key: str, namespace: str) -> Record | None:
        try:
            return self.files.read_record(namespace, key, self.layout)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def begin(self, key: str, namespace: str) -> None:
        self.files.begin(namespace, key)

    def write(
        self,
        record: Record,
        data: bytes,
        pages: Sequence[torch.Tensor],
        numbers: Sequence[int] | None,
        summary: bytes,
    ) -> bool:
        parts = [data, *(page.numpy() for page in pages), *([summary] if summary else [])]
        try:
            return self.files.write(record.namespace, record.key, parts, fsync=self._fsync)
        except OSError as error:
            reason = "disk_full" if disk_is_full(error) else "io"
            self.faults(reason, f"writing document {record.key}: {error}")
            return False

    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        return self.files.replace_summary(old, data, summary, fsync=self._fsync)

    def read_summary(self, record: Record) -> bytes | None:
        return self.files.read_summary(record)

    def read(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> str:
        buffers = [target.numpy() for target in targets]
        try:
            self.bytes_read += self.files.read_pages(
                record.namespace, record.key, self.layout.page_bytes, blocks, buffers
            )
        except FileNotFoundError:
            return "missing"
        except (PageError, OSError) as error:
            self.faults.note(error, f"reading document {record.key}")
            return NO_DESCRIPTOR if lacks_descriptor(error) else "unreadable"
        return ""

    def remove(self, key: str, namespace: str, record: Record | None) -> bool:
        return self.files.remove(namespace, key)

    def remove_namespace(self, namespace: str) -> list[str]:
        return self.files.remove_namespace(namespace)

    def clear(self) -> None:
        failed = None
        for namespace in self.files.namespaces():
            try:
                self.files.remove_namespace(namespace)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def sweep(self) -> None:
        self.files.sweep_trash()

    def sync_removals(self, namespaces: Collection[str]) -> None:
        self.files.sync_removals(namespaces)

    def touch(self, key: str, namespace: str) -> None:
        self.files.touch(namespace, key)

    def close(self) -> None:
        self.files.release()

    def verify(self, found: PageFile) -> Record:
        return read_document(self.files, found, self.layout)

    # only where there is a folder

    def locate(self, key: str, namespace: str | None) -> PageFile | None:
        """Find a document by path, in the namespace or, without one, in each there is. Raises OSError where
        one of these cannot be read and no other has it."""
        unread = None
        for name in self.files.namespaces() if namespace is None else [namespace]:
            try:
                if (found := self.files.find(name, key)) is not None:
                    return found
            except OSError as error:
                unread = error
        if unread is not None:
            raise unread
        return None

    def scan(self, failed: Callable[[OSError], object] | None = None) -> Iterator[PageFile]:
        """See `DocumentFiles.scan`."""
        return self.files.scan(failed=failed)
