"""The tiers below the device of one tensor-parallel rank, as the scheduler sees them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.documents import stats
from sglang_ext.documents.disk.disk import DiskTier, Faults, FileTier
from sglang_ext.documents.disk.disk_index import DiskIndex
from sglang_ext.documents.disk.hicache import BackendTier, by_pool_index
from sglang_ext.documents.disk.page_files import PageFile
from sglang_ext.documents.disk.verification import Verification, VerifyReport
from sglang_ext.documents.fill import DocumentKv
from sglang_ext.documents.pages.host import HostTier
from sglang_ext.documents.pages.metrics import KvMetrics, kv_metrics
from sglang_ext.documents.pages.page_format import digest, token_array
from sglang_ext.documents.pages.stored_pages import StoredPages
from sglang_ext.documents.pages.types import (
    OWN_BACKEND,
    DiskConfig,
    DocumentMeta,
    IntegrityError,
    KvShape,
    LoadTicket,
    RemoteConfig,
)
from sglang_ext.documents.promote import Promoter
from sglang_ext.documents.remote_build import remote_tier
from sglang_ext.documents.removal import Removal
from sglang_ext.documents.summaries import Summaries, SummaryTicket
from sglang_ext.documents.tiers import Tiers
from sglang_ext.documents.writeback import WriteBack

# Pool pages for reading, for writing and for verifying records and summaries, where a backend accesses only
# the pool.
_SCRATCH_PAGES = 3


class TierStore:
    """Documents' KV on host and disk, within a byte budget each, and in a store that engines share.

    Scheduler thread only; the store's own threads do everything slow. Only ``flush``, ``verify`` and
    ``close`` wait for the disk; ``host_pages`` and ``pin`` may read a record (4 KiB for most documents) that
    is not in memory yet. Nothing leaves the host tier between two calls: pages that ``host_pages`` returned
    can be pinned right after it. Errors of the disk are misses: counted in ``stat()["faults"]``, logged at
    most once a minute per reason, never raised. After ``close`` every method raises RuntimeError."""

    def __init__(
        self,
        shape: KvShape,
        *,
        fingerprint: str,
        host_bytes: int,
        disk: DiskConfig | None,
        remote: RemoteConfig | None = None,
        pin: bool,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """``pin`` registers the host pool with CUDA. Raises StoreInUse when another process owns the disk
        folder, ValueError for wrong options of the shared store. One that is away raises nothing.
        """
        self.shape = shape
        self.fingerprint = fingerprint
        metrics = kv_metrics()
        metrics.own = int(rank == 0)
        metrics.page_bits.set(shape.bits)
        layout = shape.layout(fingerprint, rank, world)
        faults = Faults(lambda reason: metrics.faults.labels(reason).inc())
        scratch = _SCRATCH_PAGES if disk is not None and by_pool_index(disk) else 0
        host = HostTier(shape, budget_bytes=host_bytes, pin=pin, scratch_pages=scratch)
        self._disk_config = disk
        tier = DiskTier(layout, faults)
        index = DiskIndex(None)
        if disk is not None and disk.backend == OWN_BACKEND:
            tier = FileTier(disk, layout, faults)
            index = DiskIndex(disk.budget_bytes)
        elif disk is not None:
            # a place for each size of values: some backends keep the first of a key, whatever its size
            model = fingerprint if shape.bits == 16 else f"{fingerprint}|{shape.bits} bits"
            tier = BackendTier(disk, layout, faults, host, model_name=digest(model).hex()[:16])
        index.scanned = index.complete = not isinstance(tier, FileTier)
        self._tiers = Tiers(shape, layout, host, index, tier, faults, metrics)
        self._tiers.remote = None if remote is None else remote_tier(remote, self._tiers)
        self._summaries = Summaries(self._tiers)
        queue_bytes = disk.queue_bytes if disk is not None else 0
        self._writes = WriteBack(self._tiers, queue_bytes=queue_bytes, late_summary=self._summaries.put)
        self._promoter = Promoter(self._tiers, None if disk is None else self._writes.offer)
        self._removal = Removal(self._tiers, self._writes)
        self._verification: Verification | None = None
        self._tiers.io.write(self._tiers.scan)  # before any other write, which then knows what is there

    @property
    def pages(self) -> StoredPages:
        """The host tier's pages, the same memory for the store's life."""
        return StoredPages(self._tiers.host.pool, self.shape)

    @property
    def metrics(self) -> KvMetrics:
        """The process's metrics of documents."""
        return self._tiers.metrics

    @property
    def host_limit(self) -> int:
        """Pages that the host tier may hold."""
        return self._tiers.host.limit

    def fault(self, reason: str, message: str) -> None:
        """Count what turned a hit into a miss; logged at most once a minute per reason."""
        self._tiers.faults(reason, message)

    @property
    def closed(self) -> bool:
        return self._tiers.closed

    # finding

    def count(self, tier: str | None, documents: int = 1) -> None:
        """Count documents as found in a tier (device, host, disk, remote), or as misses with None."""
        with self._tiers.open() as tiers:
            tiers.counts[f"hits_{tier}" if tier else "misses"] += documents
            metrics = tiers.metrics
            (metrics.hits.labels(tier) if tier else metrics.misses).inc(documents * metrics.own)

    def host_pages(self, key: str, token_ids: Sequence[int], namespace: str) -> npt.NDArray[np.int64] | None:
        """Find a document: the host page number of each block, -1 where only the disk has it.

        Returns None when a block is in no tier, or when the key stands for other token ids or another
        namespace. A document that the start's scan has not reached is found by one stat. Pin the document
        before any other call of the store; the numbers are valid until it is unpinned."""
        with self._tiers.open() as tiers:
            entry, found = tiers.find(key, token_ids, namespace)
            if not found:
                return None
            if entry is None:
                return np.full(self.shape.blocks(len(token_ids)), -1, dtype=np.int64)
            entry.wait_copied()
            return np.array(entry.pages, dtype=np.int64)

    def host_pages_or_look(
        self, key: str, token_ids: Sequence[int], namespace: str
    ) -> tuple[npt.NDArray[np.int64] | None, bool]:
        """``host_pages``, and where that is None what ``looks_for`` says, as one question: the shared store
        cannot answer in between."""
        with self._tiers.open() as tiers:
            pages = self.host_pages(key, token_ids, namespace)
            return pages, pages is None and tiers.looks_for(key, namespace)

    def looks_for(self, key: str, namespace: str) -> bool:
        """Look in the shared store for a document that this engine does not have whole. True while that is
        worth waiting for; then ``host_pages`` or ``where`` tells."""
        with self._tiers.open() as tiers:
            return tiers.looks_for(key, namespace)

    def retrieved(self, keys: Sequence[str], namespace: str) -> None:
        """Count documents that a request was answered from: the shared store takes those that save it enough
        prefill."""
        with self._tiers.open() as tiers:
            for key in keys:
                tiers.retrieved(key, namespace)

    def where(self, key: str, namespace: str) -> tuple[bool, str]:
        """Return whether all of the document is on host, and the lowest tier of this engine that has all of
        it: `disk`, `writing` (in the write queue), `remote` where neither has, `host` or `absent`. Does not
        count as a use.
        """
        with self._tiers.open() as tiers:
            entry = tiers.host.entries.get(key)
            if entry is not None and entry.namespace != namespace:
                return False, "absent"
            on_host = entry is not None and not entry.missing()
            if tiers.find_on_disk(key, namespace) is not None:
                return on_host, "disk"
            if self._writes.has(key):
                return on_host, "writing"
            if tiers.in_remote(key, namespace) is not None:
                return on_host, "remote"
            return on_host, "host" if on_host else "absent"

    def held(self) -> dict[str, Any]:
        """See `stats.held`."""
        with self._tiers.open() as tiers:
            return stats.held(tiers)

    def room(self) -> dict[str, Any]:
        """See `stats.room`."""
        with self._tiers.open() as tiers:
            return stats.room(tiers, self._writes, self._disk_config)

    # filling

    def put(
        self,
        meta: DocumentMeta,
        k: Sequence[torch.Tensor] | torch.Tensor,
        v: Sequence[torch.Tensor] | torch.Tensor,
        summary: bytes = b"",
        *,
        slots: torch.Tensor | None = None,
        to_disk: bool = True,
    ) -> None:
        """Store a document's KV, per layer [n, kv_heads, head_dim], K rotated for positions 0..n-1 of the
        document alone. With ``slots``, int64 [n], these rows of larger buffers.

        Copies it into host pages now (from CUDA: enqueued on the current stream, and waited for where the
        pages are read) and queues it to disk. Without room on host it goes to disk only; without room in the
        queue either it is not kept. With ``to_disk`` False it stays off the disk, unless it is there or is
        put again without. A document that is present only gets what it lacks. ``summary`` is stored with it
        (see ``put_summary``). Raises ValueError for KV of another shape, dtype or model."""
        kv = DocumentKv.of(k, v, slots)
        kv.check(self.shape, meta.n_tokens)
        self._check(meta)
        token_ids = token_array(meta.token_ids)
        with self._tiers.open(changing=True) as tiers:
            host, lasting, to_disk = tiers.host, to_disk, to_disk and self._disk_config is not None
            entry = host.entries.get(meta.key) or host.add(meta.key, meta.namespace, token_ids)
            if (entry.namespace, entry.token_ids) != (meta.namespace, token_ids):
                host.settle(entry)
                raise ValueError(
                    f"document key {meta.key} already stands for another document: "
                    "keys must be digests of all that they name"
                )
            missing = entry.missing()
            pages = host.allocate(len(missing), keep=entry) if missing else []
            if pages is None:
                host.settle(entry)
                if to_disk:
                    self._writes.offer_aside(meta, token_ids, kv, summary)
            else:
                tiers.fill(entry, missing, pages, kv)
                entry.summary = summary or entry.summary
                entry.lasting = entry.lasting or lasting
                host.entries.move_to_end(meta.key)
                if to_disk:
                    # on disk since before a restart: need not be written again
                    tiers.find_on_disk(meta.key, meta.namespace)
                    self._writes.offer(entry)
                tiers.offer(meta.key, meta.namespace)
            if summary:
                self._summaries.put(meta.key, summary)
            host.shrink()

    def put_summary(self, key: str, data: bytes) -> bool:
        """Keep these bytes with a document and store them with its pages, in place of what could not be used;
        False where it is in no tier.
        """
        with self._tiers.open(changing=True):
            return self._summaries.put(key, data, unusable=True)

    def summary(self, key: str) -> SummaryTicket:
        """The bytes kept with a document: at once from host, else read from disk by an IO thread. No page is
        read.
        """
        with self._tiers.open():
            return self._summaries.get(key)

    def load(self, key: str, blocks: Sequence[int] | None = None) -> LoadTicket:
        """Start bringing these blocks (None: all) from disk or the shared store to host; no others are read.

        Pin the document first, or it may be evicted again before it is used. Raises IndexError for a block
        that the document does not have.
        """
        with self._tiers.open() as tiers:
            ticket = self._promoter.load(key, blocks)
            tiers.host.shrink()
            return ticket

    def pin(self, key: str) -> None:
        """Keep the document's pages on host, present ones and those that come, until as many ``unpin``.
        Raises KeyError for an unknown document.
        """
        with self._tiers.open() as tiers:
            entry = tiers.host.entries.get(key)
            if entry is None:
                on_disk = tiers.find_on_disk(key, None) is not None
                record = tiers.record(key) if on_disk else tiers.in_remote(key, None)
                entry = None if record is None else tiers.host.add(key, record.namespace, record.token_ids)
            if entry is None:
                raise KeyError(f"document {key} is in no tier")
            entry.pins += 1

    def unpin(self, key: str) -> None:
        """Undo one ``pin``. Raises KeyError when there is none."""
        with self._tiers.open() as tiers:
            entry = tiers.host.find(key)
            if entry is None or entry.pins == 0:
                raise KeyError(f"document {key} is not pinned")
            entry.pins -= 1
            tiers.host.settle(entry)
            tiers.host.shrink()

    # removing

    def remove(self, key: str, namespace: str | None = None) -> bool:
        """Remove a document from every tier; True if it was on host or disk. Pages that are pinned stay
        readable, but no lookup finds them. A file that cannot be deleted now is not found either, and is
        deleted once that is possible. The shared store deletes it later (`unconfirmed`), if the
        ``namespace`` is given or the document is on host or disk.
        """
        with self._tiers.open(changing=True):
            return self._removal.remove(key, namespace)

    def remove_from_host(self, key: str) -> None:
        """Remove from the host what was put with ``to_disk`` False, and so is in no tier below, as `remove`
        does. No deletion is queued in the shared store, where many become one of the whole namespace."""
        with self._tiers.open(changing=True) as tiers:
            if (entry := tiers.host.entries.get(key)) is not None and not entry.lasting:
                tiers.host.remove(entry)

    def remove_namespace(self, namespace: str, keys: Collection[str] = ()) -> int:
        """Remove all documents of a namespace and return their number. On disk this is one rename. Backends
        that cannot list a namespace look for ``keys``, too.
        """
        with self._tiers.open(changing=True):
            return self._removal.remove_namespace(namespace, keys)

    def clear(self) -> None:
        """Remove everything from every tier, including what the scan has not reached."""
        with self._tiers.open(changing=True):
            self._removal.clear()

    def unconfirmed(self, keys: Sequence[str] | None, namespace: str | None) -> tuple[int, bool]:
        """How many of these deletions (without ``keys`` of a namespace, without either of everything) the
        shared store has not confirmed, and whether it may do so soon: not while it is away. It is asked until
        it has, by the next process if need be."""
        with self._tiers.open() as tiers:
            return (0, False) if tiers.remote is None else tiers.remote.left(keys, namespace)

    def drop_host(self, keys: Sequence[str] | None = None) -> int:
        """Evict every document (of ``keys`` only, if given) from host that nobody reads or writes, and return
        their number. What is not on disk is lost: ``flush`` first.
        """
        with self._tiers.open(changing=True) as tiers:
            return tiers.host.drop(keys)

    # budgets, figures, checks

    def set_budget(self, *, host_bytes: int | None = None, disk_bytes: int | None = None) -> None:
        """Change budgets, evicting at once what no longer fits. Raises ValueError for a host budget above the
        pool allocated at the start.
        """
        with self._tiers.open(changing=True) as tiers:
            if host_bytes is not None:
                tiers.host.set_limit(host_bytes)
            if disk_bytes is not None and tiers.disk.has_folder:
                if disk_bytes < 0:
                    raise ValueError("the disk budget cannot be negative")
                tiers.index.budget = disk_bytes
                if tiers.index.scanned:
                    tiers.make_disk_room(0)

    def stat(self) -> dict[str, Any]:
        """JSON-safe figures per tier; bytes are of pages on host and of whole files on disk."""
        with self._tiers.open() as tiers:
            tiers.host.shrink()
            return stats.stat(tiers, self._writes, self._disk_config)

    def verify(self) -> VerifyReport:
        """Read every page on disk against its CRC and check the accounting. Slow; bad documents are reported,
        not removed.
        """
        report = self._read_all()
        try:
            self.check_integrity()
        except IntegrityError as error:
            report.integrity = str(error)
        return report

    def verification(self, number: int | None = None) -> Verification:
        """Read every page on a thread of its own: the verification of that number, or, without one or where
        it is gone, the one that runs now or begins now.
        """
        last = self._verification
        if last is None or (number is None and last.report.done()):
            last = self._verification = Verification(0 if last is None else last.number + 1, self._read_all)
        return last

    def _read_all(self) -> VerifyReport:
        """Read every page on disk; of any thread. Ends early where the store is closed."""
        with self._tiers.open() as tiers:
            listed = [
                PageFile(entry.namespace, key, entry.size, 0.0) for key, entry in tiers.index.entries.items()
            ]
        if isinstance(tiers.disk, FileTier):
            listed = list(tiers.disk.scan())
        report = VerifyReport()
        report.add(itertools.takewhile(lambda found: not tiers.closed, listed), tiers.disk.verify)
        return report

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every host page has exactly one owner (free, a document, a load) and
        every sum and budget is right.
        """
        with self._tiers.open() as tiers:
            tiers.host.shrink()  # what a smaller budget could not evict while it was being written
            tiers.host.check()
            tiers.index.check()
            if tiers.remote is not None:
                tiers.remote.index.check()
            self._writes.check()

    def demote(self, keys: Sequence[str], namespace: str) -> bool:
        """See `Tiers.demote`."""
        with self._tiers.open(changing=True) as tiers:
            return tiers.demote(keys, namespace)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is stored and no load is in progress; False on timeout."""
        with self._tiers.open() as tiers:
            remote = tiers.remote
        until = time.monotonic() + timeout_s
        drained = self._writes.drain(timeout_s)
        return drained and (remote is None or remote.idle(max(0.0, until - time.monotonic())))

    def close(self) -> None:
        """Stop. Idempotent. What is not on disk yet is lost (see ``flush``); unfinished tickets end with
        reason `closed`.
        """
        tiers = self._tiers
        with tiers.lock:
            if tiers.closed:
                return
            tiers.closed = True
        tiers.io.close()
        if tiers.remote is not None:
            tiers.remote.close()
        with tiers.lock:
            self._promoter.close()
            for entry in tiers.host.all_entries():
                entry.wait_copied()
            tiers.host.close()
            tiers.delete_again()
        tiers.disk.close()

    def _check(self, meta: DocumentMeta) -> None:
        if meta.fingerprint != self.fingerprint:
            raise ValueError(
                f"document {meta.key} was computed by another model "
                f"({meta.fingerprint}; this store has {self.fingerprint})"
            )
