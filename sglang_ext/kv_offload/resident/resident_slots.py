"""Slots of the KV pool as resident blocks of offloaded requests: taken, added and given back before SGLang
schedules.

SGLang counts the slots of a request behind ``cache_protected_len`` as its own. That follows every change, so
its accounts, leak checks and retraction are right at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.kv_offload.resident.resident_blocks import ResidentTable
from sglang_ext.kv_offload.resident.shared_blocks import SharedTable
from sglang_ext.versions import protect, protected_tokens

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache


class ResidentSlots:
    """Scheduler thread only, on the stream of SGLang's allocator.

    Attributes:
        promised: free slots that are left to a prompt that is prefilled in chunks. SGLang has counted all of
            it when it admitted the request, takes slots for each chunk, and ends where it finds none."""

    def __init__(
        self, tree: DocumentRadixCache, table: torch.Tensor, page_size: int, copies: CopyStream
    ) -> None:
        """``tree``: SGLang's prefix cache. ``table``: the request table, int32 [requests, tokens]."""
        self._tree = tree
        self._table = table
        self._page = page_size
        self._copies = copies
        self.promised = 0

    def take(self, resident_blocks: int) -> torch.Tensor | None:
        """Return the slots of this many resident blocks, int64, evicting from the prefix cache; None without
        room.
        """
        allocator, tokens = self._tree.token_to_kv_pool_allocator, resident_blocks * self._page
        short = tokens - allocator.available_size()
        if short + self.promised > self._tree.evictable_size():
            return None  # what others may find in the cache would go for nothing
        if short > 0:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self._tree.evict(EvictParams(num_tokens=short))
        slots: torch.Tensor | None = allocator.alloc(tokens)
        return slots

    def in_order(self, row: OffloadedRow, resident_blocks: torch.Tensor | None = None) -> torch.Tensor:
        """Return a request's resident blocks, or these, as they stand in the request table: the last one
        first.
        """
        resident_blocks = row.blocks.slots if resident_blocks is None else resident_blocks
        if resident_blocks is None:
            raise IntegrityError("a request without resident blocks is to have them in the request table")
        return resident_blocks.view(-1, self._page).flip(0).flatten()

    def reserve(self, row: OffloadedRow, new_table: Callable[[], ResidentTable | SharedTable]) -> None:
        """Let a request have its resident blocks, if the pool has room for them. ``new_table``: makes theirs.

        SGLang counts the slots behind ``cache_protected_len`` as the request's own: the resident blocks, too.
        """
        held, slots = row.blocks, self.take(row.blocks.count)
        if slots is None:
            return
        # noted before what may lack memory, because `OffloadedRows.release` gives it back
        held.slots, held.protected = slots, protected_tokens(row.req)
        protect(row.req, held.protected - len(slots))
        held.pages = self.pages_of(slots)
        held.table = new_table()

    def place(self, row: OffloadedRow) -> None:
        """Write a request's blocks into the request table: block c in place of its last prompt page but c.

        Pages before them are the pool's dummy page. On the stream of the forward passes: steps that have been
        launched and still wait there copy the table first."""
        held, end = row.req.ragserve_resident_blocks
        self._copies.await_on_current(None, held)
        begin = end - len(held)
        self._table[row.request, begin:end] = held.to(self._table.dtype)
        dummy = torch.arange(self._page, dtype=self._table.dtype, device=self._table.device)
        self._table[row.request, :begin] = dummy.repeat(begin // self._page)
        row.blocks.placed = True

    def note(self, row: OffloadedRow, held: torch.Tensor, *, placed: bool = False) -> None:
        """Let SGLang count a moved request's resident blocks, ``held`` `in_order`, as its own.

        ``placed``: the request table names them already; else the next step that reads a new selection finds
        them there."""
        end = row.pages * self._page
        protect(row.req, end - len(held))
        row.req.ragserve_resident_blocks = (held, end)
        row.counts.resident_blocks = row.blocks.count
        row.blocks.placed = placed

    def resize(self, row: OffloadedRow, resident_blocks: int) -> None:
        """Let a moved request have another number of resident blocks; without room for more it keeps those it
        has.

        Resident blocks that it loses are forgotten now. The selection at hand may read them, and one that has
        been loaded and is not read yet: they are given back when the next one is (`give_back`)."""
        if row.blocks.table is None or row.blocks.slots is None or row.blocks.leaving:
            return
        resident_blocks = min(resident_blocks, row.pages)
        more = resident_blocks - row.blocks.count
        if more > 0:
            self._add(row, more)
        elif more < 0:
            self._resize_table(row, resident_blocks)
            row.blocks.leaving, row.blocks.leave_after = -more, 1 + row.loads.pending

    def give_back(self, row: OffloadedRow) -> None:
        """Free the resident blocks that a request has lost, once no selection names them any more."""
        if row.blocks.slots is None or not row.blocks.leaving or row.blocks.leave_after > 0:
            return
        kept = row.blocks.count * self._page
        resident_blocks, gone = row.blocks.slots[:kept], row.blocks.slots[kept:]
        held, pages = self.in_order(row, resident_blocks), self.pages_of(resident_blocks)
        # the table must not name what others may get; steps that wait to read it read nothing there
        end, dummy = row.pages * self._page, torch.arange(self._page, device=gone.device)
        places = self._table[row.request, end - kept - len(gone) : end - kept]
        places.copy_(dummy.repeat(row.blocks.leaving))
        if row.blocks.table is not None:
            row.blocks.table.drop(self.pages_of(gone))
        self._free(gone)
        row.blocks.slots, row.blocks.pages, row.blocks.leaving = resident_blocks, pages, 0
        self.note(row, held)

    def _free(self, resident_blocks: torch.Tensor) -> None:
        """Free the slots of whole resident blocks. SGLang's `free` would look for their pages, and wait for
        the device."""
        self._tree.token_to_kv_pool_allocator.free_segment(resident_blocks, start_pos=0)

    def pages_of(self, resident_blocks: torch.Tensor) -> torch.Tensor:
        """Return the pages of resident blocks, int32, of their slots."""
        return (resident_blocks[:: self._page] // self._page).to(torch.int32)

    def _add(self, row: OffloadedRow, more: int) -> None:
        slots = self.take(more)
        if slots is None or row.blocks.slots is None:
            return
        try:
            resident_blocks = torch.cat((row.blocks.slots, slots))
            held, pages = self.in_order(row, resident_blocks), self.pages_of(resident_blocks)
            self._resize_table(row, row.blocks.count + more)
        except BaseException:  # the request does not know of them
            self._tree.token_to_kv_pool_allocator.free(slots)
            raise
        row.blocks.slots, row.blocks.pages = resident_blocks, pages
        self.note(row, held)

    def _resize_table(self, row: OffloadedRow, resident_blocks: int) -> None:
        if row.blocks.table is None:
            return
        with self._copies.behind(*row.blocks.table.tensors):
            row.blocks.table.resize(resident_blocks)
        row.blocks.count = resident_blocks
