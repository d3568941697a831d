"""The host and disk tiers of one tensor-parallel rank, as the scheduler sees them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.documents import stats as report
from sglang_ext.documents.disk import Faults, FileTier, open_disk
from sglang_ext.documents.disk_index import DiskIndex
from sglang_ext.documents.hicache import BackendTier, by_pool_index
from sglang_ext.documents.host import HostEntry, HostTier, fill_pages
from sglang_ext.documents.metrics import KvMetrics, kv_metrics
from sglang_ext.documents.page_files import PageFile
from sglang_ext.documents.page_format import digest, token_array
from sglang_ext.documents.promote import Promoter
from sglang_ext.documents.summaries import Summaries, SummaryTicket
from sglang_ext.documents.tiers import Locked, Tiers
from sglang_ext.documents.types import (
    OWN_BACKEND,
    DiskConfig,
    DocumentMeta,
    IntegrityError,
    KvShape,
    LoadTicket,
    Resident,
    VerifyReport,
)
from sglang_ext.documents.writeback import WriteBack

logger = logging.getLogger(__name__)
# for reading and for writing records and summaries, and for verifying, where a backend wants them inside the
# pool
_SCRATCH_PAGES = 3


class TierStore:
    """Documents' KV on host and disk, within a byte budget each.

    To be called from one thread (the scheduler's); its own IO threads do everything slow. Nothing here waits
    for the disk but ``flush``, ``verify`` and ``close``; ``lookup`` of a document that is only on disk and
    not yet known reads its record (4 KiB for most). Between two calls nothing leaves the host tier: what
    ``lookup`` said is on host can be pinned right after it. Errors of the disk are misses: counted in
    ``stat()["faults"]``, logged at most once a minute per reason, never raised."""

    def __init__(
        self,
        shape: KvShape,
        *,
        fingerprint: str,
        host_bytes: int,
        disk: DiskConfig | None,
        pin: bool,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """``pin`` registers the host pool with CUDA. Raises StoreInUse when another process owns the disk
        folder.
        """
        self.shape = shape
        self.fingerprint = fingerprint
        metrics = kv_metrics()
        layout = shape.layout(fingerprint, rank, world)
        faults = Faults(lambda reason: metrics.faults.labels(reason).inc())
        scratch = _SCRATCH_PAGES if disk is not None and by_pool_index(disk) else 0
        host = HostTier(shape, budget_bytes=host_bytes, pin=pin, scratch_pages=scratch)
        self._disk_config = disk
        tier = None
        if disk is not None:
            model_name = digest(fingerprint).hex()[:16]
            tier = open_disk(
                disk, layout, faults, lambda: BackendTier(disk, layout, faults, host, model_name=model_name)
            )
        own = disk is not None and disk.backend == OWN_BACKEND
        index = DiskIndex(disk.budget_bytes if disk is not None and own else None)
        index.complete = not own
        self._tiers = Tiers(shape, layout, host, index, tier, faults, metrics)
        self._summaries = Summaries(self._tiers)
        queue_bytes = disk.queue_bytes if disk is not None else 0
        self._writes = WriteBack(self._tiers, queue_bytes=queue_bytes, late_summary=self._summaries.put)
        self._promoter = Promoter(self._tiers)
        if self._tiers.io is not None:
            self._tiers.io.write(
                self._tiers.scan
            )  # the first write job: what comes after it knows what is there

    @property
    def pool(self) -> torch.Tensor:
        """[pages, 2 (K, V), layers, kv_heads, block, head_dim], the same memory for the store's life."""
        return self._tiers.host.pool

    # finding

    def lookup(
        self, key: str, token_ids: Sequence[int], namespace: str | None = None, *, count: bool = True
    ) -> Resident | None:
        """Where the document is; None when a block of it is nowhere, or when its token ids or namespace are
        not these.

        With ``namespace`` a document that the start's scan has not reached yet is found by one stat; without
        it, by one per namespace. ``count=False`` leaves hits and misses alone, for callers that ask again
        about the same request and ``count`` themselves."""
        with self._open():
            resident = self._lookup(key, token_ids, namespace)
        if count:
            self.count(
                None if resident is None else "host" if bool(resident.blocks_on_host.all()) else "disk"
            )
        return resident

    def count(self, tier: str | None, documents: int = 1) -> None:
        """Count documents as found in a tier (device, host, disk), or as misses."""
        with self._open() as tiers:
            tiers.counts[f"hits_{tier}" if tier else "misses"] += documents
            (tiers.metrics.hits.labels(tier) if tier else tiers.metrics.misses).inc(documents)

    @property
    def metrics(self) -> KvMetrics:
        """The process's metrics of documents."""
        return self._tiers.metrics

    def host_pages(self, key: str, token_ids: Sequence[int], namespace: str) -> npt.NDArray[np.int64] | None:
        """As ``lookup`` finds a document, without counting it: the page number of each of its blocks, -1
        where only the disk has it.

        Pin it before anything else is done with the store; the numbers are valid until it is unpinned.
        """
        with self._open():
            found = self._find(key, token_ids, namespace)
            if found is None:
                return None
            entry = found[0]
            if entry is None:
                return np.full(self.shape.blocks(len(token_ids)), -1, dtype=np.int64)
            entry.wait_copied()
            return np.array(entry.pages, dtype=np.int64)

    def _lookup(self, key: str, token_ids: Sequence[int], namespace: str | None) -> Resident | None:
        found = self._find(key, token_ids, namespace)
        if found is None:
            return None
        entry, owner, on_disk = found
        blocks = self.shape.blocks(len(token_ids))
        on_host = torch.zeros(blocks, dtype=torch.bool) if entry is None else torch.tensor(entry.pages) >= 0
        return Resident(len(token_ids), on_host, torch.full((blocks,), on_disk), owner)

    def _find(
        self, key: str, token_ids: Sequence[int], namespace: str | None
    ) -> tuple[HostEntry | None, str, bool] | None:
        """A document that can be served: its entry on host, its namespace, and whether it is on disk. Notes
        that it was used.
        """
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        on_disk = tiers.find_on_disk(key, namespace) is not None
        record = tiers.record(key) if entry is None and on_disk else None
        known = entry or record
        if known is None or namespace not in (None, known.namespace):
            return None
        try:
            same = known.token_ids == token_array(token_ids)
        except ValueError:
            same = False
        if not same:
            tiers.faults("tokens", f"document {key} was asked for with other token ids")
            return None
        if entry is not None:
            tiers.host.entries.move_to_end(key)
        if not on_disk and (entry is None or entry.missing()):
            return None
        if on_disk:
            tiers.index.touch(key)
        return entry, known.namespace, on_disk

    def pages(self, key: str, blocks: Sequence[int]) -> torch.Tensor:
        """int64 page numbers of these blocks in ``pool``; raises KeyError if one is not on host. Valid while
        the document is pinned.
        """
        with self._open() as tiers:
            entry = tiers.host.find(key)
            numbers = (
                []
                if entry is None
                else [entry.pages[block] if 0 <= block < len(entry.pages) else -1 for block in blocks]
            )
            if entry is None or -1 in numbers:
                raise KeyError(f"document {key}: not all of the blocks asked for are on host")
            entry.wait_copied()
            return torch.tensor(numbers, dtype=torch.int64)

    def where(self, key: str, namespace: str) -> tuple[bool, str]:
        """Whether all of the document is on host, and the lowest tier that has all of it: disk, `writing` (on
        its way there), host or absent. No use of it is noted."""
        with self._open() as tiers:
            entry = tiers.host.entries.get(key)
            if entry is not None and entry.namespace != namespace:
                return False, "absent"
            on_host = entry is not None and not entry.missing()
            if tiers.find_on_disk(key, namespace) is not None:
                return on_host, "disk"
            if self._writes.has(key):
                return on_host, "writing"
            return on_host, "host" if on_host else "absent"

    def room(self) -> dict[str, Any]:
        """For whoever warms many documents: the lowest tier, its budget, the write queue in bytes of pages,
        and faults so far.
        """
        with self._open() as tiers:
            disk = tiers.disk is not None
            return {
                "lasting": "disk" if disk else "host",
                "budget_bytes": tiers.index.budget if disk else tiers.host.limit * self.shape.page_bytes,
                "write_room_bytes": self._writes.room(),
                "queued_bytes": self._writes.queued_bytes,
                "block": self.shape.block,
                "page_bytes": self.shape.page_bytes,
                "faults": dict(tiers.faults.counts),
            }

    # filling

    def put(self, meta: DocumentMeta, k: torch.Tensor, v: torch.Tensor, summary: bytes = b"") -> None:
        """Take a document's KV, [layers, n, kv_heads, head_dim] each, K rotated for positions 0..n-1 of the
        document alone.

        Copied into host pages now (from CUDA: enqueued on the current stream, and waited for where the pages
        are read), then queued to disk. Without room on host it goes to disk only; without room in the queue
        either it is not kept. A document that is there already only gets what it lacks. ``summary`` is stored
        with it (see ``put_summary``). Raises ValueError for KV of another shape, dtype or model."""
        self._check(meta, k, v)
        token_ids = token_array(meta.token_ids)
        with self._open() as tiers:
            host = tiers.host
            entry = host.doomed.get(meta.key)
            if entry is not None:
                host.revive(entry)
            entry = host.entries.get(meta.key) or host.add(meta.key, meta.namespace, token_ids)
            if (entry.namespace, entry.token_ids) != (meta.namespace, token_ids):
                host.settle(entry)
                raise ValueError(
                    f"document key {meta.key} stands for another document already: keys must be digests of all they name"
                )
            missing = entry.missing()
            pages = host.allocate(len(missing), keep=entry) if missing else []
            if pages is None:
                host.settle(entry)
                if tiers.disk is not None:
                    self._writes.offer_aside(meta, token_ids, k, v, summary)
            else:
                entry.summary = summary or entry.summary
                entry.holds += 1
                try:
                    fill_pages(tiers.host.pool, self.shape, missing, pages, k, v)
                finally:
                    entry.holds -= 1
                    host.attach(entry, missing, pages)
                if k.is_cuda and missing:
                    entry.copied = torch.cuda.Event()
                    entry.copied.record(torch.cuda.current_stream(k.device))
                moved = len(missing) * self.shape.page_bytes
                tiers.moved["to_host"] += moved
                tiers.metrics.moved.labels("to_host").inc(moved)
                host.entries.move_to_end(meta.key)
                if tiers.disk is not None:
                    tiers.find_on_disk(
                        meta.key, meta.namespace
                    )  # from before a restart: it need not be written again
                    self._writes.offer(entry)
            if summary:
                self._summaries.put(meta.key, summary)
            host.shrink()
            tiers.refresh()

    def put_summary(self, key: str, data: bytes) -> bool:
        """Keep these bytes with a document that is on host or disk, and store them with its pages; False
        where it is in no tier.
        """
        with self._open() as tiers:
            found = self._summaries.put(key, data)
            tiers.refresh()
            return found

    def summary(self, key: str) -> SummaryTicket:
        """The bytes kept with a document: at once from host, else read from disk by an IO thread; nothing
        else of the document is.
        """
        with self._open():
            return self._summaries.get(key)

    def load(self, key: str, blocks: Sequence[int] | None = None) -> LoadTicket:
        """Start bringing these blocks (None: all) from disk to host; only they are read. Raises IndexError
        for a block there is not.

        Pin the document first, or it may be evicted again before it is used.
        """
        with self._open() as tiers:
            ticket = self._promoter.load(key, blocks)
            tiers.host.shrink()
            return ticket

    def pin(self, key: str) -> None:
        """Keep the document's pages on host, those that are there and those that come, until as many
        ``unpin``. KeyError if unknown.
        """
        with self._open() as tiers:
            entry = tiers.host.entries.get(key)
            if entry is None and tiers.find_on_disk(key, None) is not None:
                record = tiers.record(key)
                entry = None if record is None else tiers.host.add(key, record.namespace, record.token_ids)
            if entry is None:
                raise KeyError(f"document {key} is in no tier")
            entry.pins += 1

    def unpin(self, key: str) -> None:
        """Undo one ``pin``; KeyError when there is none."""
        with self._open() as tiers:
            entry = tiers.host.find(key)
            if entry is None or entry.pins == 0:
                raise KeyError(f"document {key} is not pinned")
            entry.pins -= 1
            tiers.host.settle(entry)
            tiers.host.shrink()

    # removing

    def remove(self, key: str) -> bool:
        """Remove from host and disk; whether it was there. While pinned its pages stay readable, but nobody
        finds it any more.
        """
        with self._open() as tiers:
            found = self._remove(key)
            tiers.refresh()
            return found

    def remove_namespace(self, namespace: str) -> int:
        """Remove all documents of a namespace; how many there were. On disk that is one rename, whatever
        their number.
        """
        with self._open() as tiers:
            keys = self._keys(tiers, namespace)
            if tiers.disk is not None:
                try:
                    keys.update(tiers.disk.remove_namespace(namespace))
                except OSError as error:
                    tiers.faults("io", f"removing namespace {namespace}: {error}")
            for key in keys:
                self._remove(key)
            tiers.note_trash()
            tiers.refresh()
            return len(keys)

    def clear(self) -> None:
        """Remove everything from host and disk."""
        with self._open() as tiers:
            for key in self._keys(tiers, None):
                self._remove(key)
            if tiers.disk is not None:
                try:
                    tiers.disk.clear()  # and what the scan has not seen
                except OSError as error:
                    tiers.faults("io", f"clearing the document folder: {error}")
                tiers.note_trash()
            tiers.refresh()

    def _remove(self, key: str) -> bool:
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        tiers.find_on_disk(key, entry.namespace if entry is not None else None)
        if tiers.disk is not None and not tiers.disk.has_folder and key in tiers.index:
            tiers.record(key)  # other backends delete page by page
        writing = self._writes.cancel(key)
        on_disk = tiers.forget(key)
        if entry is not None:
            tiers.host.doom(entry)
        return entry is not None or writing or on_disk

    def drop_host(self) -> int:
        """Evict every document from host that nobody reads or writes; how many. What is not on disk is gone:
        ``flush`` first.
        """
        with self._open() as tiers:
            dropped = tiers.host.drop()
            tiers.refresh()
            return dropped

    # budgets, figures, proofs

    def set_budget(self, *, host_bytes: int | None = None, disk_bytes: int | None = None) -> None:
        """Change budgets, evicting at once what no longer fits. ValueError for a host budget above the pool
        allocated at the start.
        """
        with self._open() as tiers:
            if host_bytes is not None:
                tiers.host.set_limit(host_bytes)
            if disk_bytes is not None and tiers.disk is not None and tiers.disk.has_folder:
                if disk_bytes < 0:
                    raise ValueError("the disk budget cannot be negative")
                tiers.index.budget = disk_bytes
                if tiers.index.complete:
                    tiers.make_disk_room(0)
            tiers.refresh()

    def stat(self) -> dict[str, Any]:
        """Figures per tier, JSON-safe; bytes are of pages on host and of whole files on disk. README.md
        explains each.
        """
        with self._open() as tiers:
            tiers.host.shrink()
            return report.stat(tiers, self._writes, self._disk_config)

    def keys(self, namespace: str | None = None) -> list[str]:
        """Keys of the documents (of a namespace) on host or disk; other disk backends only list what this
        process has met.
        """
        with self._open() as tiers:
            return sorted(self._keys(tiers, namespace))

    def verify(self) -> VerifyReport:
        """Read every page on disk against its CRC, and check the accounting. Slow; bad documents are
        reported, not removed.
        """
        with self._open() as tiers:
            listed = [PageFile(entry.namespace, key, entry.size, 0.0) for key, entry in tiers.index.items()]
        if isinstance(tiers.disk, FileTier):
            listed = list(tiers.disk.scan())
        integrity = ""
        try:
            self.check_integrity()
        except IntegrityError as error:
            integrity = str(error)
        return report.verify(tiers.disk, listed, integrity)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every host page is free, a document's or on its way, once, and every
        sum and budget is right.
        """
        with self._open() as tiers:
            tiers.host.shrink()  # what a smaller budget could not take while it was being written
            tiers.host.check()
            tiers.index.check()
            self._writes.check()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that should be on disk is, and no load is in progress; False when it takes
        longer.
        """
        with self._open():
            pass
        return self._writes.drain(timeout_s)

    def close(self) -> None:
        """Stop; what is not on disk yet (see ``flush``) is lost. Idempotent. Tickets that were not done end
        with reason `closed`.
        """
        tiers = self._tiers
        with tiers.lock:
            if tiers.closed:
                return
            tiers.closed = True
            tiers.stop()
        if tiers.io is not None:
            tiers.io.close()
        with tiers.lock:
            self._promoter.close()
            for entry in (*tiers.host.entries.values(), *tiers.host.doomed.values()):
                entry.wait_copied()
            tiers.host.close()
        if tiers.disk is not None:
            tiers.disk.close()

    # helpers

    def _open(self) -> Locked:
        return Locked(self._tiers)

    @property
    def closed(self) -> bool:
        return self._tiers.closed

    def _keys(self, tiers: Tiers, namespace: str | None) -> set[str]:
        keys = {key for key, entry in tiers.host.entries.items() if namespace in (None, entry.namespace)}
        keys.update(self._writes.keys(namespace))
        keys.update(key for key, entry in tiers.index.items() if namespace in (None, entry.namespace))
        if isinstance(tiers.disk, FileTier) and not tiers.index.complete:
            keys.update(found.key for found in tiers.disk.files.scan(namespace))
        return keys

    def _check(self, meta: DocumentMeta, k: torch.Tensor, v: torch.Tensor) -> None:
        shape = self.shape
        expected = (shape.layers, meta.n_tokens, shape.kv_heads, shape.head_dim)
        for name, value in (("k", k), ("v", v)):
            if tuple(value.shape) != expected or value.dtype != shape.dtype:
                raise ValueError(
                    f"{name} is {value.dtype} {list(value.shape)}, expected {shape.dtype} {list(expected)}"
                )
        if meta.fingerprint != self.fingerprint:
            raise ValueError(
                f"document {meta.key} was computed by another model ({meta.fingerprint}, this store is of {self.fingerprint})"
            )
