"""What the parts of the store share: the tiers, the lock over them, and the operations that touch both host
and disk accounting.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator

from sglang_ext.documents.disk import DiskTier, Faults, FileTier
from sglang_ext.documents.disk_index import DiskEntry, DiskIndex
from sglang_ext.documents.host import HostTier
from sglang_ext.documents.io_pool import IoPool
from sglang_ext.documents.metrics import KvMetrics
from sglang_ext.documents.page_files import PageFile
from sglang_ext.documents.page_format import PageError, PageLayout, Record, valid_key, valid_namespace
from sglang_ext.documents.types import KvShape

logger = logging.getLogger(__name__)
_SCAN_BATCH = 256


class Tiers:
    """Every method but ``scan`` and ``sweep`` wants ``lock`` held."""

    def __init__(
        self,
        shape: KvShape,
        layout: PageLayout,
        host: HostTier,
        index: DiskIndex,
        disk: DiskTier | None,
        faults: Faults,
        metrics: KvMetrics,
    ) -> None:
        self.lock = threading.RLock()
        self.shape = shape
        self.layout = layout
        self.host = host
        self.index = index
        self.disk = disk
        self.faults = faults
        self.metrics = metrics
        self.io = IoPool("ragserve-kv") if disk is not None else None
        self.counts: Counter[str] = Counter()  # hits_device, hits_host, hits_disk, misses, dropped_writes
        self.moved: Counter[str] = Counter()  # to_host, to_disk, from_disk
        self.writing: set[str] = (
            set()
        )  # not to be found by path: neither finished nor, when removed meanwhile, ever to be
        self.closed = False
        self._stopping = False
        self._trashed = self._swept = (
            0  # removals of whole namespaces, and how many of them have given their space back
        )
        self._host_evictions = 0

    def find_on_disk(self, key: str, namespace: str | None) -> DiskEntry | None:
        """Without reading a document file: from the index, or by its path. Other backends are asked."""
        known = self.index.get(key)
        if known is not None:
            return known if namespace in (None, known.namespace) else None
        if (
            self.disk is None
            or key in self.writing
            or not valid_key(key)
            or not (namespace is None or valid_namespace(namespace))
        ):
            return None
        if not isinstance(self.disk, FileTier):
            record = self._read_record(key, namespace or "")
            if record is not None:
                self.index.add(key, record.namespace, record.file_bytes, record)
            return self.index.get(key)
        if namespace is None and self.index.complete:
            return None
        try:
            found = self.disk.locate(key, namespace)
        except OSError as error:
            self.faults("io", f"looking for document {key}: {error}")
            return None
        if found is None:
            return None
        self.index.add(key, found.namespace, found.size)
        if self.index.complete:  # it came from elsewhere; until the scan's end nobody knows the sum
            self.make_disk_room(0)
        return self.index.get(key)

    def record(self, key: str) -> Record | None:
        """The checked record of a document in the index. One that must not be used is forgotten: a miss."""
        entry, record = self.index.get(key), self.index.record(key)
        if entry is None or record is not None:
            return record
        record = self._read_record(key, entry.namespace)
        if record is None:
            self.forget(key)
            return None
        self.index.keep_record(record)
        return record

    def forget(self, key: str) -> bool:
        """Take a document off the disk, whatever is left of it there. Whether it was known."""
        record = self.index.record(key)
        entry = self.index.drop(key)
        if entry is None or self.disk is None:
            return entry is not None
        try:
            self.disk.remove(key, entry.namespace, record)
        except OSError as error:
            self.faults("io", f"removing document {key}: {error}")
        return True

    def make_disk_room(self, extra: int) -> bool:
        """Delete least recently used documents until ``extra`` more bytes fit into the disk budget; False
        when they cannot.
        """
        victims = self.index.over_budget(extra)
        if victims is None:
            return False
        for key, _ in victims:
            self.forget(key)
            self.index.evictions += 1
            self.metrics.evictions.labels("disk").inc()
        return True

    def refresh(self) -> None:
        """Bring the gauges and the host's eviction counter up to date."""
        self.metrics.bytes.labels("host").set(self.host.used * self.shape.page_bytes)
        self.metrics.bytes.labels("disk").set(self.index.used)
        self.metrics.evictions.labels("host").inc(self.host.evictions - self._host_evictions)
        self._host_evictions = self.host.evictions

    def scan(self) -> None:
        """Learn what the folder holds, oldest first in the order of eviction, then enforce the budget. Reads
        no document. An IO job.
        """
        disk = self.disk
        if not isinstance(disk, FileTier):
            return
        try:
            listed = [
                found for found in disk.scan() if valid_key(found.key) and valid_namespace(found.namespace)
            ]
        except OSError as error:
            self.faults("io", f"listing the document folder: {error}")
            listed = []
        listed.sort(key=lambda found: found.used_at, reverse=True)
        for batch in _batches(listed):
            with self.lock:
                if self._stopping:
                    return
                for found in batch:
                    # Removals hold the lock too: what is still there now is there.
                    if (
                        found.key not in self.index
                        and disk.files.find(found.namespace, found.key) is not None
                    ):
                        self.index.add(found.key, found.namespace, found.size, oldest=True)
        with self.lock:
            self.index.complete = True
            self.make_disk_room(0)
            self.refresh()
        disk.sweep()

    @property
    def trash(self) -> bool:
        """Removed namespaces still take space that no budget counts."""
        return self._trashed != self._swept

    def note_trash(self) -> None:
        """A namespace was moved aside: delete it in an IO thread."""
        self._trashed += 1
        if self.io is not None:
            self.io.write(self.sweep)

    def sweep(self) -> None:
        """Delete what was moved aside. An IO job; takes the lock itself."""
        with self.lock:
            seen = self._trashed
        if self.disk is not None:
            self.disk.sweep()
        with self.lock:
            self._swept = max(self._swept, seen)

    def stop(self) -> None:
        self._stopping = True

    def _read_record(self, key: str, namespace: str) -> Record | None:
        if self.disk is None:
            return None
        try:
            return self.disk.find(key, namespace)
        except PageError as error:
            self.faults(error.reason, f"document {key}: {error}")
        except OSError as error:
            self.faults("io", f"reading the record of document {key}: {error}")
        return None


class Locked:
    """``with`` the lock held and the store open. RuntimeError where it was closed."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def __enter__(self) -> Tiers:
        self._tiers.lock.acquire()
        if self._tiers.closed:
            self._tiers.lock.release()
            raise RuntimeError("the document store is closed")
        return self._tiers

    def __exit__(self, *exc: object) -> None:
        self._tiers.lock.release()


def _batches(found: list[PageFile]) -> Iterator[list[PageFile]]:
    for at in range(0, len(found), _SCAN_BATCH):
        yield found[at : at + _SCAN_BATCH]
