"""Slots of the KV pool as columns of hosted requests: taken, added and given back before SGLang schedules.

SGLang counts the slots of a request behind ``cache_protected_len`` as its own. That follows every change, so
its accounts, leak checks and retraction are right at any time."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.kv_offload.resident.hosted_row import HostedRow


class ColumnSlots:
    """Scheduler thread only, on the stream of SGLang's allocator.

    Attributes:
        promised: free slots that are left to a prompt that is prefilled in chunks. SGLang has counted all of
            it when it admitted the request, takes slots for each chunk, and ends where it finds none."""

    def __init__(self, tree: Any, table: torch.Tensor, page_size: int, copies: CopyStream) -> None:
        """``tree``: SGLang's prefix cache. ``table``: the request table, int32 [requests, tokens]."""
        self._tree = tree
        self._table = table
        self._page = page_size
        self._copies = copies
        self.promised = 0

    def take(self, columns: int) -> torch.Tensor | None:
        """Return the slots of this many columns, int64, evicting from the prefix cache; None without room."""
        allocator, tokens = self._tree.token_to_kv_pool_allocator, columns * self._page
        short = tokens - allocator.available_size()
        if short + self.promised > self._tree.evictable_size():
            return None  # what others may find in the cache would go for nothing
        if short > 0:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self._tree.evict(EvictParams(num_tokens=short))
        slots: torch.Tensor | None = allocator.alloc(tokens)
        return slots

    def in_order(self, row: HostedRow, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Return a request's columns, or these, as they stand in the request table: the last one first."""
        columns = row.columns if columns is None else columns
        if columns is None:
            raise IntegrityError("a request without columns is to have them in the request table")
        return columns.view(-1, self._page).flip(0).flatten()

    def note(self, row: HostedRow, held: torch.Tensor) -> None:
        """Let SGLang count a moved request's columns, ``held`` `in_order`, as its own."""
        end = row.pages * self._page
        row.req.cache_protected_len = end - len(held)
        row.req.ragserve_columns = (held, end)
        row.counts.columns = row.n_columns
        row.placed = False  # the next step that reads a new choice finds them in the request table

    def resize(self, row: HostedRow, columns: int) -> None:
        """Let a moved request have another number of columns; without room for more it keeps those it has.

        Columns that it loses are forgotten now. The choice at hand may read them, and one that has been
        loaded and is not read yet: they are given back when the next one is (`give_back`)."""
        if row.table is None or row.columns is None or row.leaving:
            return
        columns = min(columns, row.pages)
        more = columns - row.n_columns
        if more > 0:
            self._add(row, more)
        elif more < 0:
            self._resize_table(row, columns)
            row.leaving, row.leave_after = -more, 1 + row.has_load

    def give_back(self, row: HostedRow) -> None:
        """Free the columns that a request has lost, once no choice names them any more."""
        if row.columns is None or not row.leaving or row.leave_after > 0:
            return
        kept = row.n_columns * self._page
        columns, gone = row.columns[:kept], row.columns[kept:]
        held, pages = self.in_order(row, columns), self.pages_of(columns)
        # the table must not name what others may get; steps that wait to read it read nothing there
        end, dummy = row.pages * self._page, torch.arange(self._page, device=gone.device)
        places = self._table[row.request, end - kept - len(gone) : end - kept]
        places.copy_(dummy.repeat(row.leaving))
        if row.table is not None:
            row.table.drop(self.pages_of(gone))
        self._free(gone)
        row.columns, row.column_pages, row.leaving = columns, pages, 0
        self.note(row, held)

    def _free(self, columns: torch.Tensor) -> None:
        """Free the slots of whole columns. SGLang's `free` looks for their pages, which waits for the device;
        `free_segment`, which SGLang 0.5.16 lacks, takes pages as they lie."""
        allocator = self._tree.token_to_kv_pool_allocator
        if hasattr(allocator, "free_segment"):
            allocator.free_segment(columns, start_pos=0)
        else:
            allocator.free(columns)

    def pages_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the pages of columns, int32, of their slots."""
        return (columns[:: self._page] // self._page).to(torch.int32)

    def _add(self, row: HostedRow, more: int) -> None:
        slots = self.take(more)
        if slots is None or row.columns is None:
            return
        try:
            columns = torch.cat((row.columns, slots))
            held, pages = self.in_order(row, columns), self.pages_of(columns)
            self._resize_table(row, row.n_columns + more)
        except BaseException:  # the request does not know of them
            self._tree.token_to_kv_pool_allocator.free(slots)
            raise
        row.columns, row.column_pages = columns, pages
        self.note(row, held)

    def _resize_table(self, row: HostedRow, columns: int) -> None:
        if row.table is None:
            return
        with self._copies.behind(*row.table.tensors):
            row.table.resize(columns)
        row.n_columns = columns
