"""State shared by the parts of the store: the tiers, the lock over them, and operations on them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from sglang_ext.documents.disk.disk import DiskTier, Faults, FileTier, lacks_descriptor
from sglang_ext.documents.disk.disk_index import DiskEntry, DiskIndex
from sglang_ext.documents.disk.io_pool import IoPool
from sglang_ext.documents.fill import DocumentKv, fill_pages
from sglang_ext.documents.pages.host import HostEntry, HostTier
from sglang_ext.documents.pages.metrics import KvMetrics
from sglang_ext.documents.pages.page_format import (
    PageError,
    PageLayout,
    Record,
    token_array,
    valid_key,
    valid_namespace,
)
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.documents.remote.tier import RemoteTier
from sglang_ext.wire.own_names import is_own

_SCAN_BATCH = _DELETE_BATCH = 256


class Tiers:
    """The host, disk and remote tiers. Every method but ``open``, ``scan`` and ``sweep`` requires
    ``lock``."""

    def __init__(
        self,
        shape: KvShape,
        layout: PageLayout,
        host: HostTier,
        index: DiskIndex,
        disk: DiskTier,
        faults: Faults,
        metrics: KvMetrics,
    ) -> None:
        self.lock = threading.RLock()
        self.shape = shape
        self.layout = layout
        self.host = host
        self.index = index
        self.disk = disk
        self.remote: RemoteTier | None = None  # a store that engines share
        self.faults = faults
        self.metrics = metrics
        self.io = IoPool("ragserve-kv")
        self.counts: Counter[str] = Counter()  # hits_<tier>, misses, dropped_writes
        self.moved: Counter[str] = Counter()  # to_host, to_disk, from_disk, from_remote
        # documents whose file is being written: not to be found by path until then, or ever if removed
        self.writing: set[str] = set()
        # documents whose file could not be deleted, by key: not to be found either
        self.undeleted: dict[str, tuple[str, Record | None]] = {}
        self.closed = False
        self._trashed = self._swept = 0  # removals; those whose space has been freed
        self._sweeps = False  # a sweep is queued
        self._host_evictions = 0
        self._removed: set[str] = set()  # namespaces with removals that are not synced yet

    @contextmanager
    def open(self, *, changing: bool = False) -> Iterator[Tiers]:
        """Hold the lock of a store that is not closed, else raise RuntimeError. ``changing`` refreshes the
        metrics afterwards.
        """
        with self.lock:
            if self.closed:
                raise RuntimeError("the document store is closed")
            yield self
            if changing:
                self.refresh()

    def find(self, key: str, token_ids: Sequence[int], namespace: str) -> tuple[HostEntry | None, bool]:
        """Find a document that can be served and record its use: its host entry, and whether it was found.

        Not found: a block of it is in no tier, or the key stands for other token ids (a fault) or another
        namespace."""
        entry = self.host.entries.get(key)
        on_disk = self.find_on_disk(key, namespace) is not None
        there = None if on_disk else self.in_remote(key, namespace)
        record = self.record(key) if entry is None and on_disk else there
        known = entry or record
        if known is None or namespace != known.namespace:
            return None, False
        try:
            same = known.token_ids == token_array(token_ids)
        except ValueError:
            same = False
        if not same:
            self.faults("tokens", f"document {key} was asked for with other token ids")
            return None, False
        if entry is not None:
            self.host.entries.move_to_end(key)
        if on_disk:
            self.index.entries.move_to_end(key)
        below = on_disk or there is not None
        return entry, below or (entry is not None and not entry.missing())

    def in_remote(self, key: str, namespace: str | None) -> Record | None:
        """The record of a document that the shared store is known to have."""
        return None if self.remote is None else self.remote.record(key, namespace)

    def looks_for(self, key: str, namespace: str) -> bool:
        """Look in the shared store for a document that no tier of this engine has whole. True while that is
        worth waiting for."""
        return self.remote is not None and self.remote.looks_for(key, namespace)

    def retrieved(self, key: str, namespace: str) -> None:
        """Count a retrieval, and offer the document to the shared store, which takes those worth it."""
        if self.remote is None:
            return
        self.remote.values.note(key)
        self.offer(key, namespace)

    def offer(self, key: str, namespace: str, *, anyway: bool = False) -> bool:
        """Offer a document to the shared store, ``anyway`` whatever its value; True while it is on its
        way."""
        if self.remote is None:
            return False
        if self.remote.lacks(key, namespace):
            entry = self.host.entries.get(key)
            if entry is not None and entry.lasting and not entry.missing():
                self.remote.offer(entry, anyway=anyway)
            elif self.find_on_disk(key, namespace) is not None and (record := self.record(key)) is not None:
                self.remote.offer_from_disk(record, anyway=anyway)
        return self.remote.stores(key)

    def demote(self, keys: Sequence[str], namespace: str) -> bool:
        """Store documents in the shared store, whatever their value, and forget them on disk; True while some
        are on their way. For measurements."""
        waits = [key for key in keys if self.offer(key, namespace, anyway=True)]
        for key in () if waits else keys:
            if self.in_remote(key, namespace) is not None:
                self.forget(key)
        return bool(waits)

    def fill(self, entry: HostEntry, blocks: Sequence[int], pages: Sequence[int], kv: DocumentKv) -> None:
        """Copy these blocks into host pages allocated for them. If that fails, the document has none of them
        and the pages are free again."""
        entry.in_flight += 1
        try:
            fill_pages(self.host.pool, self.shape, blocks, pages, kv)
        except BaseException:
            if kv.is_cuda:  # copies launched before the failure still write to the pages
                torch.cuda.current_stream(kv.slots.device).synchronize()
            entry.in_flight -= 1
            self.host.give_back(pages)
            self.host.settle(entry)
            raise
        entry.in_flight -= 1
        self.host.attach(entry, blocks, pages)
        if kv.is_cuda and blocks:
            entry.copied = torch.cuda.Event()
            entry.copied.record(torch.cuda.current_stream(kv.slots.device))
        self.count_moved("to_host", len(blocks) * self.shape.page_bytes)

    def find_on_disk(self, key: str, namespace: str | None) -> DiskEntry | None:
        """Find a document in the index, or by its path, without reading its file; other backends are queried.
        Without a namespace every namespace is tried.
        """
        known = self.index.entries.get(key)
        if known is not None:
            return known if namespace in (None, known.namespace) else None
        valid = valid_key(key) and (namespace is None or valid_namespace(namespace))
        if key in self.writing or key in self.undeleted or not valid:
            return None
        if not isinstance(self.disk, FileTier):
            record = self._read_record(key, namespace or "")
            if record is not None:
                self.index.add(key, record.namespace, record.file_bytes, record)
            return self.index.entries.get(key)
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
        if self.index.scanned:  # put there by another program; before the scan's end the sum is unknown
            self.make_disk_room(0)
        return self.index.entries.get(key)

    def record(self, key: str) -> Record | None:
        """The checked record of a document in the index. A record that must not be used is a miss, and the
        document is forgotten, unless no file descriptor was left to read it.
        """
        entry, record = self.index.entries.get(key), self.index.record(key)
        if entry is None or record is not None:
            return record
        try:
            record = self.disk.find(key, entry.namespace)
        except (PageError, OSError) as error:
            self.faults.note(error, f"reading the record of document {key}")
            if lacks_descriptor(error):
                return None
        if record is None:
            self.forget(key)
            return None
        self.index.keep_record(record)
        return record

    def forget(self, key: str) -> bool:
        """Delete whatever the disk has of a document (see ``delete``); True if the index knew it."""
        record = self.index.record(key)
        entry = self.index.drop(key)
        if entry is not None:
            self.delete(key, entry.namespace, record)
        return entry is not None

    def delete(self, key: str, namespace: str, record: Record | None) -> None:
        """Delete a document's file. One that cannot be deleted now is hidden, and deleted by
        ``delete_again``; a restart before that finds it."""
        try:
            if self.disk.remove(key, namespace, record) and self.disk.has_folder:
                self.note_trash()
        except (PageError, OSError) as error:
            self.faults.note(error, f"removing document {key}")
            self.undeleted[key] = namespace, record

    def delete_again(self) -> None:
        """Delete some of what could not be deleted, but nothing that is being written anew. Ends with the
        first that fails again: the lock is held, and a backend that is away takes its time."""
        most = _DELETE_BATCH if self.disk.has_folder else 1
        for key, (namespace, record) in list(islice(self.undeleted.items(), most)):
            del self.undeleted[key]
            if key in self.writing:
                self.undeleted[key] = namespace, record
                continue
            self.delete(key, namespace, record)
            if key in self.undeleted:
                return

    def stored(self, record: Record) -> None:
        """Note that a document has been written."""
        self.undeleted.pop(record.key, None)
        self.index.add(record.key, record.namespace, record.file_bytes, record)

    def make_disk_room(self, extra: int) -> bool:
        """Delete least recently used documents until ``extra`` more bytes fit into the disk budget; False if
        they cannot.
        """
        victims = self.index.over_budget(extra)
        if victims is None:
            return False
        for key, _ in victims:
            self.forget(key)
            self.index.evictions += 1
            self.metrics.evictions.labels("disk").inc(self.metrics.own)
        return True

    def count_moved(self, direction: str, bytes_: int) -> None:
        """Count bytes moved `to_host`, `to_disk`, `from_disk` or `from_remote`."""
        self.moved[direction] += bytes_
        self.metrics.moved.labels(direction).inc(bytes_)

    def refresh(self) -> None:
        """Update the gauges and the host's eviction counter."""
        self.metrics.bytes.labels("host").set(self.host.used * self.shape.page_bytes)
        self.metrics.bytes.labels("disk").set(self.index.used)
        evicted = self.host.evictions - self._host_evictions
        self.metrics.evictions.labels("host").inc(evicted * self.metrics.own)
        self._host_evictions = self.host.evictions

    def scan(self) -> None:
        """List the folder into the index, oldest first in the order of eviction, then enforce the budget.
        Documents that a server which was killed had measured with are removed. Reads no document. An IO job;
        takes the lock itself. The index stays incomplete, and documents are looked for by path, where a part
        of the folder cannot be listed.
        """
        disk = self.disk
        if not isinstance(disk, FileTier):
            return
        complete = True

        def failed(error: OSError) -> None:
            nonlocal complete
            complete = False
            self.faults("io", f"listing the document folder: {error}")

        listed = [
            found for found in disk.scan(failed) if valid_key(found.key) and valid_namespace(found.namespace)
        ]
        listed.sort(key=lambda found: found.used_at, reverse=True)
        for at in range(0, len(listed), _SCAN_BATCH):
            with self.lock:
                if self.closed:
                    return
                for found in listed[at : at + _SCAN_BATCH]:
                    # removals take the lock, too: a file that is there now was not removed since the listing
                    try:
                        there = disk.files.find(found.namespace, found.key) is not None
                    except OSError as error:
                        failed(error)
                        continue
                    known = found.key in self.index.entries or found.key in self.undeleted
                    if there and not known:
                        self.index.add(found.key, found.namespace, found.size, oldest=True)
                        if is_own(found.namespace):
                            self.forget(found.key)
        with self.lock:
            self.index.scanned, self.index.complete = True, complete
            self.make_disk_room(0)
            self.refresh()
        disk.sweep()

    @property
    def trash(self) -> bool:
        """True while what was removed takes space that no budget counts: to be swept before a write."""
        return self._trashed != self._swept

    def note_removal(self, namespace: str) -> None:
        """Sync a removal, in an IO thread; several at once where they come fast."""
        if not self._removed:
            self.io.write(self._sync_removals)
        self._removed.add(namespace)

    def _sync_removals(self) -> None:
        with self.lock:
            namespaces, self._removed = self._removed, set()
            self.delete_again()
        try:
            self.disk.sync_removals(namespaces)
        except OSError as error:
            self.faults("io", f"syncing removals: {error}")

    def note_trash(self) -> None:
        """Delete what was moved aside, in an IO thread."""
        self._trashed += 1
        if not self._sweeps:
            self._sweeps = self.io.write(self.sweep)

    def sweep(self) -> None:
        """Delete what was moved aside. An IO job; takes the lock itself, for no time."""
        with self.lock:
            seen, self._sweeps = self._trashed, False
        try:
            self.disk.sweep()
        except OSError as error:
            self.faults("io", f"freeing the space of removed documents: {error}")
            return
        with self.lock:
            self._swept = max(self._swept, seen)

    def _read_record(self, key: str, namespace: str) -> Record | None:
        try:
            return self.disk.find(key, namespace)
        except (PageError, OSError) as error:
            self.faults.note(error, f"reading the record of document {key}")
        return None
