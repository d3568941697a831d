"""The disk tier's documents, in memory: sizes, order of use and a bounded number of records."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sglang_ext.documents.pages.page_format import Record
from sglang_ext.documents.pages.types import IntegrityError

RECORD_CACHE_BYTES = 32 * 2**20
# Documents remembered of a backend that keeps its own limits; the backend is asked again for others.
MAX_FOREIGN = 65_536


@dataclass(eq=False, slots=True)
class DiskEntry:
    namespace: str
    size: int  # bytes on disk, record included


class DiskIndex:
    """Documents on disk, least recently used first. Not thread-safe: every caller holds the store's lock.

    ``used`` counts the bytes of whole files, ``reserved`` those being written; together they stay within
    ``budget`` (None: the backend enforces its own)."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.used = 0
        self.reserved = 0
        self.scanned = False  # the scan at start has ended
        self.complete = False  # it has listed all
        self.evictions = 0
        self.entries: OrderedDict[str, DiskEntry] = OrderedDict()  # changed by ``add`` and ``drop`` only
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._record_bytes = 0

    def add(
        self, key: str, namespace: str, size: int, record: Record | None = None, *, oldest: bool = False
    ) -> None:
        """Add or update a document. ``oldest`` makes it the first to be evicted, for documents found by the
        scan.
        """
        self.drop(key)
        self.entries[key] = DiskEntry(namespace, size)
        self.used += size
        if oldest:
            self.entries.move_to_end(key, last=False)
        if record is not None:
            self.keep_record(record)
        if self.budget is None and len(self.entries) > MAX_FOREIGN:
            self.drop(next(iter(self.entries)))

    def drop(self, key: str) -> DiskEntry | None:
        """Remove a document from the index and return its entry."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.used -= entry.size
        self._forget_record(key)
        return entry

    def record(self, key: str) -> Record | None:
        """The document's record, if it is in memory."""
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record

    def keep_record(self, record: Record) -> None:
        """Keep a document's record in memory, within ``RECORD_CACHE_BYTES``."""
        self._forget_record(record.key)
        self._records[record.key] = record
        self._record_bytes += record.record_bytes
        while self._record_bytes > RECORD_CACHE_BYTES and len(self._records) > 1:
            self._forget_record(next(iter(self._records)))

    def over_budget(self, extra: int = 0) -> list[tuple[str, DiskEntry]] | None:
        """Documents to delete so that ``extra`` more bytes fit, oldest first; None if deleting all of them
        were not enough.

        With ``extra`` 0 the answer is never None: a write in progress may exceed a budget that shrank."""
        if self.budget is None:
            return []
        surplus = self.used + self.reserved + extra - self.budget
        if extra and surplus > self.used:
            return None
        victims = []
        for key, entry in self.entries.items():
            if surplus <= 0:
                break
            victims.append((key, entry))
            surplus -= entry.size
        return victims

    def check(self) -> None:
        """Raise IntegrityError when a sum is wrong or a budget is exceeded."""
        if self.used != sum(entry.size for entry in self.entries.values()):
            raise IntegrityError("the bytes on disk are not the sum of the documents'")
        if self._record_bytes != sum(record.record_bytes for record in self._records.values()):
            raise IntegrityError("the bytes of records in memory are not their sum")
        if self.reserved < 0:
            raise IntegrityError("more disk bytes were released than reserved")
        if not self._records.keys() <= self.entries.keys():
            raise IntegrityError("a record is kept of a document that is not on disk")
        # Until the scan ends the sum grows without a write, and writes wait for it. A write overtaken by a
        # smaller budget may exceed it alone (used == 0), and is deleted as soon as it is done.
        total = self.used + self.reserved
        if self.scanned and self.budget is not None and self.used and total > self.budget:
            raise IntegrityError(f"{total} bytes on disk, {self.budget} allowed")

    def _forget_record(self, key: str) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._record_bytes -= record.record_bytes
