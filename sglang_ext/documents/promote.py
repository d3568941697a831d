"""Promotion: single blocks of documents from disk, or from the shared store, to host, in the IO threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from sglang_ext.documents.disk.disk import NO_DESCRIPTOR
from sglang_ext.documents.pages.host import HostEntry
from sglang_ext.documents.pages.page_format import Record
from sglang_ext.documents.pages.types import LoadPart, LoadTicket
from sglang_ext.documents.remote.tier import LOAD_S
from sglang_ext.documents.tiers import Tiers

_PART_BYTES = 2 * 2**20  # below this a second thread costs more than it saves


class Promoter:
    """Promotes documents. Every method requires the store's lock; the reads themselves run without it."""

    def __init__(self, tiers: Tiers, on_fetched: Callable[[HostEntry], None] | None) -> None:
        """``on_fetched`` is called under the lock for a document of which all is on host now, and some of it
        came from the shared store.
        """
        self._tiers = tiers
        self._on_fetched = on_fetched

    def load(self, key: str, blocks: Sequence[int] | None) -> LoadTicket:
        """Start loading blocks (None: all). Raises IndexError for a block the document does not have."""
        tiers, host = self._tiers, self._tiers.host
        entry = host.entries.get(key)
        record, tier = None, "disk"
        if entry is None or entry.missing():
            record = tiers.record(key) if tiers.find_on_disk(key, None) is not None else None
            if record is None:
                record, tier = tiers.in_remote(key, None if entry is None else entry.namespace), "remote"
        if entry is None:
            if record is None:
                return LoadTicket(reason="unknown")
            entry = host.add(key, record.namespace, record.token_ids)
            entry.lasting = True
        ticket = self._load_entry(entry, record, tier, blocks)
        host.settle(entry)
        if key in host.entries:
            host.entries.move_to_end(key)
        return ticket

    def close(self) -> None:
        """End the loads that will not run any more with reason `closed`."""
        for entry in self._tiers.host.all_entries():
            for part in entry.parts_loading():
                self._end(entry, part, "closed")

    def _load_entry(
        self, entry: HostEntry, record: Record | None, tier: str, blocks: Sequence[int] | None
    ) -> LoadTicket:
        tiers = self._tiers
        wanted = range(len(entry.pages)) if blocks is None else sorted(set(blocks))
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < len(entry.pages):
            tiers.host.settle(entry)
            raise IndexError(
                f"document {entry.key} has blocks 0 to {len(entry.pages) - 1}, "
                f"asked for {wanted[0]} to {wanted[-1]}"
            )
        absent = [block for block in wanted if entry.pages[block] < 0]
        missing = [block for block in absent if block not in entry.loading]
        parts = [part for part in entry.parts_loading() if any(block in part.blocks for block in absent)]
        if not missing:
            return LoadTicket(parts)
        if record is None:
            return LoadTicket(reason="not_on_disk")
        pages = tiers.host.allocate(len(missing), keep=entry)
        if pages is None:
            return LoadTicket(reason="no_room")
        per_part = max(1, -(-len(missing) // 2), _PART_BYTES // tiers.shape.page_bytes)
        starts = range(0, len(missing), per_part)
        own = [LoadPart(missing[at : at + per_part], pages[at : at + per_part], tier=tier) for at in starts]
        io = tiers.io
        if tier == "remote" and tiers.remote is not None:
            io = tiers.remote.io
            for part in own:
                part.late_at = time.monotonic() + LOAD_S
        ticket = LoadTicket([*parts, *own])
        for part in own:
            part.counted_by = ticket
            entry.in_flight += 1
            entry.loading.update(dict.fromkeys(part.blocks, part))
        for part in own:
            if not io.read(partial(self._run, entry, part, record)):
                self._end(entry, part, "closed")
        return ticket

    def _run(self, entry: HostEntry, part: LoadPart, record: Record) -> None:
        """An IO job."""
        tiers, started = self._tiers, time.perf_counter()
        remote = tiers.remote if part.tier == "remote" else None
        tier, reason = remote or tiers.disk, "io"
        try:
            targets = [tiers.host.page_view(page) for page in part.pages]
            reason = tier.load(record, part.blocks, targets, part.pages)
        except OSError as error:
            tiers.faults("io", f"loading document {entry.key}: {error}")
        finally:
            tiers.metrics.load_seconds.observe(time.perf_counter() - started)
            with tiers.lock:
                failed = bool(reason)
                if reason == "missing" and not entry.removed and remote is None:
                    tiers.faults("missing", f"document {entry.key} is gone from the disk")
                self._end(entry, part, reason)
                if not failed:
                    tier.touch(entry.key, entry.namespace)
                    whole = remote is not None and not entry.removed and not entry.missing()
                    if whole and self._on_fetched is not None:
                        self._on_fetched(entry)
                elif remote is not None:
                    (remote.broken if reason in ("missing", "crc") else remote.miss)(record)
                elif reason == NO_DESCRIPTOR:
                    pass  # the file may be read next time
                elif not entry.removed and tiers.index.record(entry.key) is record:
                    tiers.forget(entry.key)
                tiers.refresh()

    def _end(self, entry: HostEntry, part: LoadPart, reason: str) -> None:
        tiers, host = self._tiers, self._tiers.host
        for block in part.blocks:
            if entry.loading.get(block) is part:
                del entry.loading[block]
        if reason:
            host.give_back(part.pages)
            if all(entry.pages[block] >= 0 for block in part.blocks):
                reason = ""  # put again during the load
            elif entry.removed:
                reason = "removed"
        else:
            host.attach(entry, part.blocks, part.pages)
            part.bytes_ = len(part.pages) * tiers.shape.page_bytes
            tiers.count_moved(f"from_{part.tier}", part.bytes_)
        entry.in_flight -= 1
        part.reason = reason
        host.settle(entry)
        part.finished.set()
