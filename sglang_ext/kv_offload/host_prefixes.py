"""KV on host pages of requests that are not in a batch: they wait for resident blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragserve_kernels.resident_gather import resident_gather
from sglang_ext.documents.fill import DocumentKv, fill_pages
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.kv_offload.resident.offloaded_row import HeldBlocks, OffloadedRow
from sglang_ext.wire.protocol import OffloadCounts


class HostPrefixes:
    """Makes offloaded requests such ones and back, and fills host pages before there is a request on the
    device. Scheduler thread only."""

    def __init__(self, rows: OffloadedRows) -> None:
        self._rows = rows

    def reserve(
        self,
        req: Any,
        tokens: int,
        selection: int,
        resident_blocks: int,
        counts: OffloadCounts,
        *,
        shared: bool = False,
        find: Callable[[], ContextPages | None] | None = None,
    ) -> HostPrefix | None:
        """Take host pages for the whole pages of ``tokens`` tokens, which `write` fills.

        ``find``: tells whether the documents' pages hold them; then nothing has to be written. Other
        arguments and None as those of `OffloadedRows.begin`."""
        rows = self._rows
        pages, fixed = tokens // rows.page_size, resident_blocks > 0
        resident_blocks = rows.resident_blocks_of(selection, resident_blocks)
        if pages <= resident_blocks or not rows.may_begin():
            return None
        context = None if find is None else find()
        owned = None
        try:
            owned = rows.own(pages, context)
        finally:
            if owned is None and context is not None:
                context.release()
        if owned is None:
            return None
        owner, numbers, host = owned
        prefix = HostPrefix(
            *(req, owner, selection, resident_blocks, fixed, shared, host, numbers, [], tokens, counts),
            context,
        )
        self._rows.waiting[owner] = prefix
        return prefix

    def retract(self, row: OffloadedRow, tokens: int) -> HostPrefix | None:
        """`release` a request that is retracted, but keep the KV of its first ``tokens`` tokens on the host.

        None: the prompt is not copied whole yet, or there is no room for what follows it; nothing is kept.
        """
        try:
            prefix = self._kept(row, tokens)
        except BaseException:
            self._rows.release(row)
            raise
        if prefix is None:
            self._rows.release(row)
        else:
            self._rows.leave(row)
            self._rows.waiting[row.owner] = prefix
        return prefix

    def _kept(self, row: OffloadedRow, tokens: int) -> HostPrefix | None:
        rows, first = self._rows, row.pages * self._rows.page_size
        if row.copied < row.pages or tokens < first:
            return None
        count = -(-(tokens - first) // rows.page_size)
        tail = rows.pages.extend(row.owner, count)
        if tail is None:
            return None
        slots = rows.table[row.request, first:tokens].long()
        with rows.copies.behind(slots):
            kv = DocumentKv(rows.kv.k, rows.kv.v, slots, rows.kv)
            fill_pages(rows.pages.pool, rows.pages.shape, list(range(count)), tail, kv)
            rows.joins.append(rows.copies.event())  # its slots are free now, and those of its prompt
        return HostPrefix(
            *(row.req, row.owner, row.selection, row.blocks.count, row.fixed, row.shared),
            *(row.host, row.numbers, tail, tokens, row.counts, row.context),
        )

    def admit(self, prefix: HostPrefix, resident_blocks: torch.Tensor) -> OffloadedRow:
        """Make a waiting request an offloaded one that has moved. ``resident_blocks``: int64, their slots."""
        rows, context = self._rows, prefix.context
        head_bytes = rows.head_bytes if context is None else context.head_bytes
        table = rows.new_table(prefix.n_resident, prefix.pages, prefix.selection, shared=prefix.shared)
        pages = rows.slots.pages_of(resident_blocks)
        blocks = HeldBlocks(prefix.n_resident, resident_blocks, pages, table, placed=True)
        row = OffloadedRow(
            *(prefix.req, prefix.owner, -1, prefix.selection, blocks, prefix.fixed, prefix.shared),
            *(resident_blocks[:0], prefix.host, prefix.numbers, head_bytes, prefix.counts, rows.bounds.link),
            context=context,
            copied=prefix.pages,
            moved=True,
        )
        del self._rows.waiting[prefix.owner]
        rows.add(row)
        return row

    def put_back(self, row: OffloadedRow, prefix: HostPrefix) -> None:
        """Undo `admit`, but for the slots: SGLang has not admitted the request."""
        self._rows.remove(row)
        self._rows.waiting[prefix.owner] = prefix

    def enter(self, row: OffloadedRow, request: int, tail: Sequence[int]) -> None:
        """Bring what follows the prompt back to the device, before the request's first pass.

        ``request``: its row of the request table, which names its slots. ``tail``: host pages."""
        rows = self._rows
        row.enter(request)
        rows.statistics_of[request, : row.pages] = rows.first_host + row.host
        if row.context is not None and row.context.entry is not None and rows.contexts is not None:
            rows.contexts.enter(row.context, row.host)
        if not tail:
            return
        page, begin = rows.page_size, row.pages * rows.page_size
        slots = rows.table[request, begin : begin + len(tail) * page : page]
        shape = rows.kv.layers, rows.kv.kv_heads, len(tail)
        source = torch.tensor(tail, dtype=torch.int32, device=slots.device).expand(shape).contiguous()
        target = (slots // page).to(torch.int32).expand(shape).contiguous()
        with rows.copies.behind(source, target):
            resident_gather(rows.pages.pool, rows.kv, source, target)
            event = rows.copies.event()
        rows.copies.await_on_current(event)
        rows.pages.shrink(row.owner, len(tail))

    def write(
        self, row: OffloadedRow, first: int, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]
    ) -> None:
        """Copy KV into the prompt's pages from number ``first`` on, and make their statistics.

        ``k``, ``v``: per layer [tokens, kv_heads, head_dim] on the device, whole pages; what is launched next
        may overwrite them."""
        rows, page = self._rows, self._rows.page_size
        count = len(k[0]) // page
        numbers = row.numbers[first : first + count]
        with rows.copies.behind(*k, *v):
            kv = DocumentKv.of(k, v)
            fill_pages(rows.pages.pool, rows.pages.shape, list(range(count)), numbers, kv)
            event = rows.copies.event()
        where = rows.first_host + row.host[first : first + count].long()
        for layer, keys in enumerate(k):
            rows.statistics.store(layer, where, keys.unflatten(0, (count, page)))
        rows.copies.await_on_current(event)

    def forget(self, prefix: HostPrefix) -> None:
        """Free the host pages of a request that waits no longer, or is to be prefilled."""
        del self._rows.waiting[prefix.owner]
        self._rows.pages.release(prefix.owner)
