"""What the disk tier holds, in memory: sizes, order of use and a bounded number of records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ext.documents.page_format import Record
from sglang_ext.documents.types import IntegrityError

RECORD_CACHE_BYTES = 32 * 2**20
MAX_FOREIGN = (
    65_536  # documents remembered of a backend that keeps its own limits; others are asked for again
)


@dataclass(eq=False, slots=True)
class DiskEntry:
    namespace: str
    size: int  # bytes on disk, record included


class DiskIndex:
    """Documents on disk, least recently used first. Not thread-safe: the store's lock is held by every
    caller.

    ``used`` counts whole files, ``reserved`` those being written; together they stay within ``budget`` (None:
    the backend's own matter)."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.used = 0
        self.reserved = 0
        self.complete = False  # everything that was there at start is known
        self.evictions = 0
        self._entries: OrderedDict[str, DiskEntry] = OrderedDict()
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._record_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[str, DiskEntry]]:
        return iter(self._entries.items())

    def get(self, key: str) -> DiskEntry | None:
        return self._entries.get(key)

    def add(
        self, key: str, namespace: str, size: int, record: Record | None = None, *, oldest: bool = False
    ) -> None:
        """Note a document on disk, or that it changed. ``oldest`` puts it before all others, for those found
        by the scan.
        """
        self.drop(key)
        self._entries[key] = DiskEntry(namespace, size)
        self.used += size
        if oldest:
            self._entries.move_to_end(key, last=False)
        if record is not None:
            self.keep_record(record)
        if self.budget is None and len(self._entries) > MAX_FOREIGN:
            self.drop(next(iter(self._entries)))

    def drop(self, key: str) -> DiskEntry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used -= entry.size
        self._forget_record(key)
        return entry

    def touch(self, key: str) -> None:
        self._entries.move_to_end(key)

    def record(self, key: str) -> Record | None:
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record

    def keep_record(self, record: Record) -> None:
        """Keep a record of a document on disk in memory, within ``RECORD_CACHE_BYTES``."""
        self._forget_record(record.key)
        self._records[record.key] = record
        self._record_bytes += record.record_bytes
        while self._record_bytes > RECORD_CACHE_BYTES and len(self._records) > 1:
            self._forget_record(next(iter(self._records)))

    def over_budget(self, extra: int = 0) -> list[tuple[str, DiskEntry]] | None:
        """Documents to delete so that ``extra`` more bytes fit, oldest first; None when even all of them
        would not do.

        With ``extra`` 0 the answer is as many as there are: a write in progress may be all that is left of a
        budget made smaller."""
        if self.budget is None:
            return []
        surplus = self.used + self.reserved + extra - self.budget
        if extra and surplus > self.used:
            return None
        victims = []
        for key, entry in self._entries.items():
            if surplus <= 0:
                break
            victims.append((key, entry))
            surplus -= entry.size
        return victims

    def check(self) -> None:
        """Raises IntegrityError when a sum is not the sum of its parts or a budget is exceeded."""
        if self.used != sum(entry.size for entry in self._entries.values()):
            raise IntegrityError("the bytes on disk are not the sum of the documents'")
        if self._record_bytes != sum(record.record_bytes for record in self._records.values()):
            raise IntegrityError("the bytes of records in memory are not their sum")
        if self.reserved < 0:
            raise IntegrityError("more disk bytes were released than reserved")
        if not self._records.keys() <= self._entries.keys():
            raise IntegrityError("a record is kept of a document that is not on disk")
        # Until the scan ends the sum grows without anything being written; writes wait for it. A write that a
        # smaller budget overtook is the only thing left then, and goes as soon as it is done.
        if (
            self.complete
            and self.budget is not None
            and self.used
            and self.used + self.reserved > self.budget
        ):
            raise IntegrityError(f"{self.used + self.reserved} bytes on disk, {self.budget} allowed")

    def _forget_record(self, key: str) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._record_bytes -= record.record_bytes
