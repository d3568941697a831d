"""Write-through to disk, in bounded memory and without making the caller wait.

A document on host is written from its host pages, which stay until then. When the queue is full, the document
waits on host for its turn; it is not written (and counted in ``dropped_writes``) only if the host must evict
it first. A document without room on host is copied aside if the queue has room for it, else dropped.

One that the disk had no room for, or failed to write, is tried again after another write has succeeded."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_ext.documents.fill import DocumentKv, fill_pages
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.host import HostEntry
from sglang_ext.documents.pages.page_format import Record
from sglang_ext.documents.pages.types import DocumentMeta, IntegrityError
from sglang_ext.documents.tiers import Tiers


@dataclass(eq=False)
class _Write:
    key: str
    namespace: str
    token_ids: array[int]
    bytes_: int
    entry: HostEntry | None = None
    staged: torch.Tensor | None = None  # uint8 [pages, page_bytes]
    summary: bytes = b""  # of a staged document; other documents have it on host
    cancelled: bool = False
    started: bool = False


class WriteBack:
    """The write queue. Every method but ``drain`` requires the store's lock."""

    def __init__(
        self, tiers: Tiers, *, queue_bytes: int, late_summary: Callable[[str, bytes], object]
    ) -> None:
        """``late_summary(key, data)`` is called under the lock for a document whose summary arrived while the
        document was being written without it or with another.
        """
        self._tiers = tiers
        self._late_summary = late_summary
        self._limit = queue_bytes
        self._writes: dict[str, _Write] = {}
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._failed: OrderedDict[str, None] = OrderedDict()  # on host, to be tried again
        self.queued_bytes = 0

    @property
    def waiting(self) -> int:
        """Number of documents on host that wait for room in the queue."""
        return len(self._waiting)

    def has(self, key: str) -> bool:
        """True if the document is in the queue or waits for it."""
        return key in self._writes or key in self._waiting

    def room(self) -> int:
        """Page bytes that the queue accepts before documents have to wait."""
        return max(0, self._limit - self.queued_bytes)

    def offer(self, entry: HostEntry) -> None:
        """Queue a document that is complete on host, now or when there is room."""
        if entry.key in self._writes or entry.key in self._tiers.index.entries:
            return
        size = len(entry.pages) * self._tiers.shape.page_bytes
        if self.queued_bytes and self.queued_bytes + size > self._limit:
            self._waiting[entry.key] = None
            self._prune(self._waiting)
            return
        self._waiting.pop(entry.key, None)
        self._failed.pop(entry.key, None)
        write = _Write(entry.key, entry.namespace, entry.token_ids, size, entry=entry)
        entry.in_flight += 1
        self._submit(write)

    def offer_aside(
        self,
        meta: DocumentMeta,
        token_ids: array[int],
        kv: DocumentKv,
        summary: bytes,
    ) -> None:
        """Queue a copy of a document that has no room on host, unless the queue has no room either."""
        tiers = self._tiers
        if meta.key in self._writes or meta.key in tiers.index.entries:
            return
        blocks = range(tiers.shape.blocks(meta.n_tokens))
        size = len(blocks) * tiers.shape.page_bytes
        if self.queued_bytes + size > self._limit:
            tiers.counts["dropped_writes"] += 1
            return
        staged = tiers.shape.empty_pages(len(blocks))
        fill_pages(staged, tiers.shape, blocks, blocks, kv)
        if kv.is_cuda:
            torch.cuda.current_stream(kv.slots.device).synchronize()
        self._submit(
            _Write(
                meta.key,
                meta.namespace,
                token_ids,
                size,
                staged=staged.view(len(blocks), -1).view(torch.uint8),
                summary=summary,
            )
        )

    def cancel(self, key: str) -> bool:
        """Drop a removed document from the queue; True if it was queued or waiting."""
        was_waiting = key in self._waiting
        self._waiting.pop(key, None)
        self._failed.pop(key, None)
        write = self._writes.pop(key, None)
        if write is None:
            return was_waiting
        write.cancelled = True
        if write.started:
            self._tiers.delete(key, write.namespace, None)
        return True

    def keys(self, namespace: str | None = None) -> list[str]:
        """Keys of the documents in the queue. Documents that wait for it are on host."""
        return [write.key for write in self._writes.values() if namespace in (None, write.namespace)]

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; False on timeout."""
        until = time.monotonic() + timeout_s
        while True:
            idle = self._tiers.io.wait_idle(max(0.0, until - time.monotonic()))
            with self._tiers.lock:
                if idle and not self._writes and not self._waiting:
                    return True
                self._pump()
            if time.monotonic() >= until:
                return False

    def check(self) -> None:
        """Raise IntegrityError when the queue exceeds its limit or counts wrongly."""
        largest = max((write.bytes_ for write in self._writes.values()), default=0)
        if self.queued_bytes > max(self._limit, largest) and self._writes:
            raise IntegrityError(f"{self.queued_bytes} bytes wait to be written, {self._limit} allowed")
        if self.queued_bytes < sum(write.bytes_ for write in self._writes.values()):
            raise IntegrityError("the write queue counts fewer bytes than it holds")

    def _submit(self, write: _Write) -> None:
        self.queued_bytes += write.bytes_
        self._writes[write.key] = write
        if not self._tiers.io.write(lambda: self._run(write)):
            self._finish(write)

    def _run(self, write: _Write) -> None:
        """An IO job."""
        tiers, disk, reserved, done = self._tiers, self._tiers.disk, 0, False
        try:
            if write.cancelled:
                return
            record, data, views, numbers, summary = self._prepare(write)
            with tiers.lock:
                tiers.delete_again()
                if write.cancelled:
                    return
                if not tiers.make_disk_room(record.file_bytes):
                    tiers.faults(
                        "too_large",
                        f"document {write.key} needs {record.file_bytes} bytes, more than the disk budget",
                    )
                    return
                reserved = record.file_bytes
                tiers.index.reserved += reserved
                write.started = True
                tiers.writing.add(write.key)
                disk.begin(write.key, write.namespace)
            if tiers.trash:
                tiers.sweep()
            done = disk.write(record, data, views, numbers, summary)
            with tiers.lock:
                if done and write.cancelled:
                    tiers.delete(write.key, write.namespace, record)
                elif done:
                    tiers.index.reserved -= reserved
                    reserved = 0
                    tiers.stored(record)
                    tiers.make_disk_room(0)  # the budget may have shrunk meanwhile
                    tiers.count_moved("to_disk", record.file_bytes)
                    if self._failed:  # one at a time: those that are too large keep failing
                        self._waiting[self._failed.popitem(last=False)[0]] = None
                    if write.entry is not None and write.entry.summary not in (b"", summary):
                        self._late_summary(write.key, write.entry.summary)
        finally:
            with tiers.lock:
                tiers.index.reserved -= reserved
                self._finish(write)
                if write.started and not done and not write.cancelled:
                    self._keep_failed(write)
                self._pump()
                tiers.refresh()

    def _prepare(self, write: _Write) -> tuple[Record, bytes, list[torch.Tensor], list[int] | None, bytes]:
        tiers = self._tiers
        layout = tiers.layout
        numbers: list[int] | None = None
        views = list(write.staged) if write.staged is not None else []
        summary = write.summary
        if write.entry is not None:
            write.entry.wait_copied()
            numbers = list(write.entry.pages)
            views = [tiers.host.page_view(page) for page in numbers]
            summary = write.entry.summary
        crcs = array(
            "I", (page_format.page_crc(write.key, block, view.numpy()) for block, view in enumerate(views))
        )
        data = page_format.encode(write.key, write.namespace, write.token_ids, crcs, layout, summary)
        crc = page_format.summary_crc(write.key, summary) if summary else 0
        record = Record(
            write.key, write.namespace, write.token_ids, crcs, len(data), layout.page_bytes, len(summary), crc
        )
        return record, data, views, numbers, summary

    def _finish(self, write: _Write) -> None:
        self.queued_bytes -= write.bytes_
        if self._writes.get(write.key) is write:
            del self._writes[write.key]
        if write.started:
            self._tiers.writing.discard(write.key)
        if write.entry is not None:
            write.entry.in_flight -= 1
            self._tiers.host.settle(write.entry)

    def _keep_failed(self, write: _Write) -> None:
        if write.entry is None:  # its copy is gone
            self._tiers.counts["dropped_writes"] += 1
            return
        self._failed[write.key] = None
        self._prune(self._failed)

    def _pump(self) -> None:
        """Move waiting documents into the queue while it has room."""
        host = self._tiers.host
        while self._waiting and self.room():
            key = next(iter(self._waiting))
            entry = host.entries.get(key)
            if entry is None or entry.missing():
                del self._waiting[key]
                self._tiers.counts["dropped_writes"] += 1
                continue
            size = len(entry.pages) * self._tiers.shape.page_bytes
            if self.queued_bytes and self.queued_bytes + size > self._limit:
                return
            del self._waiting[key]
            self.offer(entry)

    def _prune(self, keys: OrderedDict[str, None]) -> None:
        """Drop those that the host has evicted, once there are many."""
        if len(keys) <= 2 * len(self._tiers.host.entries) + 16:
            return
        gone = [key for key in keys if key not in self._tiers.host.entries]
        for key in gone:
            del keys[key]
        self._tiers.counts["dropped_writes"] += len(gone)
