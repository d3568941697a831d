"""The remote tier: documents in a store that engines share, behind the disk.

Nothing here makes the scheduler wait. A document that no other tier has is looked for by an IO thread while
its request waits, for at most `LOOKUP_S`. A store that does not answer is away: its documents are misses,
nothing is stored, deletions are kept for later, and a thread asks again until it is back."""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_ext.documents.disk.disk import DiskTier, Faults, disk_is_full
from sglang_ext.documents.disk.disk_index import DiskIndex
from sglang_ext.documents.disk.io_pool import IoPool
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.host import HostEntry, HostTier
from sglang_ext.documents.pages.metrics import KvMetrics
from sglang_ext.documents.pages.page_format import PageError, PageLayout, Record
from sglang_ext.documents.remote.deletions import Deletion, Deletions
from sglang_ext.documents.remote.document_values import DocumentValues
from sglang_ext.documents.remote.keeper import Keeper
from sglang_ext.documents.remote.remote_backend import RemoteBackend, StoreAway

LOOKUP_S = 0.5  # for which a request waits to know whether the store has a document
LOAD_S = 5.0  # for which it waits for pages
_ABSENT_S = 2.0  # other engines store documents, too: then the store is asked again
_MOST_ABSENT = 65_536


@dataclass(eq=False)
class _Copy:
    """A document on its way to the store, from its host pages or from disk."""

    key: str
    namespace: str
    token_ids: array[int]
    bytes_: int
    entry: HostEntry | None
    record: Record | None = None  # of the document on disk
    cancelled: bool = False


class RemoteTier(DiskTier):
    """Documents in a `RemoteBackend`. Every method requires the store's lock but those of `DiskTier`, which
    run in IO threads, and ``close``."""

    def __init__(
        self,
        backend: RemoteBackend,
        layout: PageLayout,
        *,
        lock: Any,
        host: HostTier,
        disk: DiskTier,
        faults: Faults,
        metrics: KvMetrics,
        values: DocumentValues,
        deletions: Deletions,
        queue_bytes: int,
        retry_s: float = 1.0,
    ) -> None:
        """``retry_s``: seconds between two attempts to reach a store that is away, or to delete."""
        super().__init__(layout, faults)
        self.index = DiskIndex(None)  # what this engine has met there; the store keeps its own limits
        self.index.scanned = self.index.complete = True
        self.io = IoPool("ragserve-remote")
        self.values = values
        self.moved: Counter[str] = Counter()  # stored, refused, given up
        self._backend = backend
        self._lock = lock
        self._host = host
        self._disk = disk
        self._metrics = metrics
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._absent: OrderedDict[str, float] = OrderedDict()  # until when the store is not asked again
        self._looking: dict[str, float] = {}  # until when requests wait for the answer
        self._copies: dict[str, _Copy] = {}
        self._deletions = deletions
        self._keeper = Keeper(backend, deletions, lock, self._busy, faults, retry_s)

    # finding

    @property
    def away(self) -> bool:
        """True while the store does not answer."""
        return self._keeper.away

    def record(self, key: str, namespace: str | None) -> Record | None:
        """The checked record of a document that the store had when it was last asked."""
        record = self.index.record(key)
        if record is None or self.away or namespace not in (None, record.namespace):
            return None
        return None if self._deletions.covers(key, record.namespace) else record

    def looks_for(self, key: str, namespace: str) -> bool:
        """Look for a document that is not known to be or not to be in the store. True while that is worth
        waiting for."""
        now = time.monotonic()
        if key in self._looking:
            return now < self._looking[key]
        if (
            self.away
            or self.index.record(key) is not None
            or self._absent.get(key, 0.0) > now
            or self._deletions.covers(key, namespace)
        ):
            return False
        self._looking[key] = now + LOOKUP_S
        if not self.io.read(partial(self._look, key, namespace)):
            del self._looking[key]
            return False
        return True

    def _look(self, key: str, namespace: str) -> None:
        """An IO job."""
        record = None
        try:
            if not self.away:  # many may wait for a store that has gone
                record = self._backend.find(key, namespace)
        except StoreAway as error:
            self._keeper.went(error)
        except (PageError, OSError) as error:
            self.faults.note(error, f"reading the record of document {key} in the shared store")
        with self._lock:
            del self._looking[key]
            if record is None or record.namespace != namespace:
                self._is_absent(key)
            elif not self._deletions.covers(key, namespace):
                self._absent.pop(key, None)
                self.index.add(key, namespace, record.file_bytes, record)

    def miss(self, record: Record) -> None:
        """Note that a document could not be read."""
        self._is_absent(record.key)

    def _is_absent(self, key: str) -> None:
        self.index.drop(key)
        self._absent[key] = time.monotonic() + _ABSENT_S
        self._absent.move_to_end(key)
        while len(self._absent) > _MOST_ABSENT:
            self._absent.popitem(last=False)

    def broken(self, record: Record) -> None:
        """Drop a document of which the store has lost or damaged a page: whole, it may be stored again."""
        self.miss(record)
        self.io.write(partial(self._drop, record))

    def _drop(self, record: Record) -> None:
        """An IO job."""
        try:
            if not self.away:
                self._backend.remove([record.key], record.namespace)
        except StoreAway as error:
            self._keeper.went(error)

    # reading, in IO threads

    def read(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> str:
        if self.away:
            return "unreadable"
        try:
            return "" if self._backend.read(record, blocks, targets) else "missing"
        except StoreAway as error:
            self._keeper.went(error)
        return "unreadable"

    def find(self, key: str, namespace: str) -> Record | None:
        return None if self.away else self._backend.find(key, namespace)

    def read_summary(self, record: Record) -> bytes | None:
        try:
            return None if self.away else self._backend.read_summary(record)
        except StoreAway as error:
            self._keeper.went(error)
        return None

    # storing

    def lacks(self, key: str, namespace: str) -> bool:
        """True for a document that could be stored: it is not there as far as is known, nor on its way."""
        known = key in self._copies or self.index.record(key) is not None
        return not (known or self.away or self._deletions.covers(key, namespace))

    def stores(self, key: str) -> bool:
        """True while a document is on its way to the store."""
        return key in self._copies

    def offer(self, entry: HostEntry, *, anyway: bool = False) -> None:
        """Queue a document that is complete on host, if the store lacks it and it is worth its bytes, or
        ``anyway``."""
        size = len(entry.pages) * self.layout.page_bytes
        self._queue(_Copy(entry.key, entry.namespace, entry.token_ids, size, entry), anyway)

    def offer_from_disk(self, record: Record, *, anyway: bool = False) -> None:
        """As ``offer``, for a document on disk."""
        size = record.n_pages * self.layout.page_bytes
        self._queue(_Copy(record.key, record.namespace, record.token_ids, size, None, record), anyway)

    def _queue(self, copy: _Copy, anyway: bool) -> None:
        wanted = anyway or self.values.admits(copy.key, len(copy.token_ids))
        if not wanted or not self.lacks(copy.key, copy.namespace):
            return
        if self._queued_bytes and self._queued_bytes + copy.bytes_ > self._queue_bytes:
            return  # its next retrieval offers it again
        self._queued_bytes += copy.bytes_
        self._copies[copy.key] = copy
        if copy.entry is not None:
            copy.entry.in_flight += 1
        if not self.io.write(partial(self._store, copy)):
            self._finish(copy)

    def _store(self, copy: _Copy) -> None:
        """An IO job."""
        record, reason = None, "given up"
        try:
            if not (copy.cancelled or self.away):
                record = self._write(copy)
                reason = "refused" if record is None else "stored"
        except StoreAway as error:
            self._keeper.went(error)
        except (PageError, OSError, ValueError) as error:
            full = disk_is_full(error)
            reason = "refused" if full else reason
            self.faults("disk_full" if full else "remote", f"storing document {copy.key}: {error}")
        finally:
            with self._lock:
                if record is not None and not copy.cancelled:
                    self._absent.pop(copy.key, None)
                    self.index.add(copy.key, copy.namespace, record.file_bytes, record)
                    self._metrics.moved.labels("to_remote").inc(record.file_bytes)
                elif reason == "refused":
                    self.values.forget(copy.key)  # it has to earn another attempt
                self.moved[reason] += 1
                self._finish(copy)

    def _write(self, copy: _Copy) -> Record | None:
        there = self._backend.find(copy.key, copy.namespace)
        if there is not None:  # another engine was faster
            return there
        pages, summary = self._pages(copy)
        crcs = array(
            "I", (page_format.page_crc(copy.key, block, page.numpy()) for block, page in enumerate(pages))
        )
        record, data = _encoded(copy.key, copy.namespace, copy.token_ids, crcs, self.layout, summary)
        return record if self._backend.write(record, data, pages, summary) else None

    def _pages(self, copy: _Copy) -> tuple[list[torch.Tensor], bytes]:
        """A document's pages and its summary. Raises PageError where the disk has lost them."""
        if copy.entry is not None:
            copy.entry.wait_copied()
            return [self._host.page_view(page) for page in copy.entry.pages], copy.entry.summary
        if copy.record is None:
            raise ValueError(f"document {copy.key} is neither on the host nor on disk")
        blocks = range(copy.record.n_pages)
        pages = list(torch.empty((len(blocks), self.layout.page_bytes), dtype=torch.uint8))
        reason = self._disk.load(copy.record, blocks, pages, [-1] * len(blocks))
        if reason:
            raise PageError(reason, "its pages on disk cannot be used")
        return pages, (self._disk.load_summary(copy.record) or b"") if copy.record.summary_bytes else b""

    def _finish(self, copy: _Copy) -> None:
        self._queued_bytes -= copy.bytes_
        if self._copies.get(copy.key) is copy:
            del self._copies[copy.key]
        if copy.entry is not None:
            copy.entry.in_flight -= 1
            self._host.settle(copy.entry)
        self._keeper.wake()  # a deletion may have waited for it

    def offer_summary(self, key: str, data: bytes) -> None:
        """Store a summary with a document that the store has without one, or with another."""
        record = self.index.record(key)
        crc = page_format.summary_crc(key, data)
        if record is None or (record.summary_bytes, record.summary_crc) == (len(data), crc) or self.away:
            return
        self.io.write(partial(self._replace, record, data))

    def _replace(self, old: Record, data: bytes) -> None:
        """An IO job."""
        new, encoded = _encoded(old.key, old.namespace, old.token_ids, old.crcs, self.layout, data)
        with self._lock:
            if self.away or self._deletions.covers(old.key, old.namespace):
                return
            if old.key in self._copies:  # dropped there meanwhile, and on its way again with its summary
                return
            copy = _Copy(old.key, old.namespace, old.token_ids, 0, None)  # a deletion waits for it
            self._copies[old.key] = copy
        done = False
        try:
            done = self._backend.replace_summary(old, new, encoded, data)
        except StoreAway as error:
            self._keeper.went(error)
        except OSError as error:
            self.faults("disk_full", f"storing the summary of document {old.key}: {error}")
        finally:
            with self._lock:
                if done and not copy.cancelled:
                    self.index.add(old.key, old.namespace, new.file_bytes, new)
                self._finish(copy)

    # removing

    def delete(self, namespace: str | None = None, key: str | None = None) -> None:
        """Delete a document, a namespace or everything. From now on this engine neither reads nor stores it;
        `left` tells when the store has confirmed it."""
        for copy in self._copies.values():
            if (namespace is None or copy.namespace == namespace) and key in (None, copy.key):
                copy.cancelled = True
        if key is not None:
            gone = [key]
        else:
            entries = self.index.entries.items()
            gone = [name for name, entry in entries if namespace in (None, entry.namespace)]
        for name in gone:
            self.index.drop(name)
            self.values.forget(name)
        self._deletions.add(Deletion(namespace, key))
        self._keeper.wake()

    def left(self, keys: Sequence[str] | None, namespace: str | None) -> tuple[int, bool]:
        """How many of these deletions the store has not confirmed, and whether to wait for that: not while
        the store is away, once the journal has them."""
        left = self._deletions.covering(keys, namespace)
        return left, bool(left) and (not self.away or self._deletions.changed)

    def _busy(self, deletion: Deletion) -> bool:
        """True while something of it is still being written."""
        return any(
            deletion.namespace in (None, copy.namespace) and deletion.key in (None, copy.key)
            for copy in self._copies.values()
        )

    # figures

    def stat(self) -> dict[str, Any]:
        """JSON-safe figures. ``documents``: those that this engine has met there."""
        return {
            "away": self.away,
            "documents": len(self.index.entries),
            "queued_bytes": self._queued_bytes,
            "unconfirmed_deletions": len(self._deletions),
            "stored": self.moved["stored"],
            "refused": self.moved["refused"],
            **self._backend.stat(),
        }

    def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; False on timeout. Without the lock."""
        return self.io.wait_idle(timeout_s)

    def close(self) -> None:
        """Stop. Without the lock."""
        self._keeper.close()
        self.io.close()
        self._backend.close()


def _encoded(
    key: str, namespace: str, ids: array[int], crcs: array[int], layout: PageLayout, summary: bytes
) -> tuple[Record, bytes]:
    data = page_format.encode(key, namespace, ids, crcs, layout, summary)
    crc = page_format.summary_crc(key, summary) if summary else 0
    return Record(key, namespace, ids, crcs, len(data), layout.page_bytes, len(summary), crc), data
