"""Columns of hosted progressive requests as one pool over all layers and KV heads (PSA's unified memory).

A *cell* is the place of a page in one layer and KV head of SGLang's pool. In the cells of a request's columns
any page of any of its layers and heads may be, so one that attends to many pages takes what others leave.
Attention finds pages by a table of all host pages, which is changed on the stream of the forward passes: what
is to be overwritten leaves it before its load begins, and what is loaded enters it once it is there."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.progressive_decode import PageCells
from sglang_ext.hosting.columns import EMPTY, RECENT

_LARGEST = 2**31
_PARTS = 1024  # of the pages attended to: the unit in which pages of different heads are compared


class Moves(NamedTuple):
    """Pages on their way into cells; int32.

    Attributes:
        entries, cells: ``[n]``: pages of layers and heads, and where they go, as `cell_gather` numbers them;
            the first ``n_moves`` are used.
        n_moves: ``[1]``: how many.
        tally: ``[4]``: as the sums of `ragserve_kernels.column_assign.Columns.tally`.
    """

    entries: torch.Tensor
    cells: torch.Tensor
    n_moves: torch.Tensor
    tally: torch.Tensor


class Cells:
    """Which cell holds which page, of one rank. Nothing waits for the device.

    Attributes:
        lists: layers times KV heads.
        of: int32 ``[host pages * lists + 1]``: the cell of each page, layer and head; `EMPTY`: none.
        held: int32 ``[pages of the pool * lists + 1]``: the reverse.
        used: likewise: number of the latest choice that has named what a cell holds; 0: none.
        none, nowhere: the last entries of ``of`` and of ``held``, which stand for nothing.
    """

    def __init__(self, kv: KVLayers, page_size: int, host_pages: int) -> None:
        """``kv``: SGLang's pool.

        Raises:
            ValueError: more pages than numbers of 32 bits.
        """
        self.lists = kv.layers * kv.kv_heads
        self.none, self.nowhere = host_pages * self.lists, kv.slots // page_size * self.lists
        if max(self.none, self.nowhere) >= _LARGEST:
            raise ValueError(
                f"{host_pages} host pages or {kv.slots // page_size} of the KV pool, in {self.lists} layers "
                "and KV heads, are too many: lower kv_hosted_bytes or take larger pages"
            )
        self.of = torch.full((self.none + 1,), EMPTY, dtype=torch.int32, device=kv.device)
        self.held = torch.full((self.nowhere + 1,), EMPTY, dtype=torch.int32, device=kv.device)
        self.used = torch.zeros_like(self.held)
        self.places = PageCells(self.of[:-1].view(host_pages, kv.layers, kv.kv_heads), kv)
        self._dropped: list[torch.Tensor] = []

    def within(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the cells of pages of the pool, int64."""
        every = torch.arange(self.lists, device=pages.device)
        return (pages.long()[:, None] * self.lists + every).flatten()

    def drop(self, pages: torch.Tensor) -> None:
        """Forget what is in pages of the pool, with the next `settle`."""
        self._dropped.append(pages)

    def settle(self) -> None:
        """Forget what was dropped, before the next forward pass, which may write there."""
        for pages in self._dropped:
            if pages.is_cuda:  # made on the stream of the allocator
                pages.record_stream(torch.cuda.current_stream())
            cells = self.within(pages)
            entries = self.held[cells].long()
            self.of.index_fill_(0, entries.masked_fill_(entries < 0, self.none), EMPTY)
            self.held.index_fill_(0, cells, EMPTY)
            self.used.index_fill_(0, cells, 0)
        self._dropped.clear()


class CellTable:
    """The cells of one request. Pages of the latest choice stay, then those named last."""

    def __init__(self, cells: Cells, columns: int, pages: int, choice: int) -> None:
        """``pages``: logical pages that a choice may name, from 0. ``choice``: how many a layer and head
        names of its own, in the mean, that count as its working set."""
        self._cells = cells
        self._pages = pages
        self._choice = choice * cells.lists
        self._named = torch.zeros(pages * cells.lists + 1, dtype=torch.int32, device=cells.of.device)
        self._moves: Moves | None = None
        self.columns = columns
        self.choices = 0

    @property
    def lists(self) -> int:
        return self._cells.lists

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `assign` reads and writes, for other streams than that of the constructor."""
        return (self._named,)

    def assign(self, choice: PageSelection, host: torch.Tensor, column_pages: torch.Tensor) -> Moves:
        """Give pages cells, as many as there are, and take those out of the table that get others.

        Args:
            choice: ranked pages, int32 ``[layers, kv_heads, n]``; negative ones and those that are not on the
                host are left alone. ``counts``: how many each layer and head has attended to: the page of
                rank r is worth what that of twice the rank is to a head that attends to twice as many.
            host: int32 ``[pages]``: host pages.
            column_pages: int32 ``[at least columns]``: pages of the pool.
        """
        self.choices += 1
        of, held, used = self._cells.of, self._cells.held, self._cells.used
        lists, none, nowhere = self.lists, self._cells.none, self._cells.nowhere
        own = self._cells.within(column_pages[: self.columns])
        blocks = choice.blocks.flatten(0, 1).T  # [n, lists]
        rank = torch.arange(len(blocks), dtype=torch.int32, device=of.device)[:, None]
        is_page = (blocks >= 0) & (blocks < self._pages)
        worth = rank * _PARTS // choice.counts.flatten().clamp_min(1)
        order = worth.masked_fill(~is_page, _LARGEST - 1).flatten().argsort(stable=True)[: len(own)]
        page, which = blocks.flatten()[order].long(), order % lists
        named = is_page.flatten()[order]
        page = page.masked_fill(~named, 0)
        entry = (host[page].long() * lists + which).masked_fill_(~named, none)
        at = of[entry].long()
        there = at >= 0
        missing = named & ~there
        used.index_fill_(0, at.masked_fill(~there, nowhere), self.choices)
        victims = own[used[own].argsort(stable=True)][: len(order)]
        count = missing.sum(0, keepdim=True)
        is_move = torch.arange(len(order), device=of.device) < count
        entries = entry.new_full((len(order) + 1,), none)
        place = (missing.cumsum(0) - 1).masked_fill_(~missing, len(order))
        entries = entries.scatter_(0, place, entry.masked_fill(~missing, none))[:-1]
        cells = victims.masked_fill(~is_move, nowhere)
        before = held[cells].long()
        of.index_fill_(0, before.masked_fill_(before < 0, none), EMPTY)
        held.index_fill_(0, cells, EMPTY)
        used.index_fill_(0, cells, self.choices)
        counted = named & (torch.arange(len(order), device=of.device) < self._choice)
        at = (page * lists + which).masked_fill_(~counted, self._pages * lists)
        self._named.index_fill_(0, at, self.choices)
        recent = (self._named[:-1] > max(0, self.choices - RECENT)).sum(0, keepdim=True)
        tally = torch.cat((there.sum(0, keepdim=True), count, torch.zeros_like(count), recent))
        self._moves = Moves(entries.int(), cells.int(), count.int(), tally.int())
        return self._moves

    def arrive(self) -> None:
        """Note that the pages of the latest choice are in their cells."""
        if self._moves is None:
            return
        entries, cells, _, _ = self._moves
        is_move = entries < self._cells.none
        self._cells.of.scatter_(0, entries.long(), cells.masked_fill(~is_move, EMPTY))
        self._cells.held.scatter_(0, cells.long(), entries.masked_fill(~is_move, EMPTY))
        self._moves = None

    def resize(self, columns: int) -> None:
        """Use so many columns from the next choice on; those that go are to be dropped."""
        self.columns = columns

    def drop(self, column_pages: torch.Tensor) -> None:
        """Forget what these columns hold: see `Cells.drop`."""
        self._cells.drop(column_pages)

    def tallied(self, tally: torch.Tensor) -> tuple[int, int, int, int, int]:
        """As `ColumnTable.tallied`; the working set is the mean of all layers and heads, as they share."""
        hits, misses, late, named = tally.tolist()
        return hits, misses, late, named, -(-named // self.lists)

    def differing(self, column_pages: torch.Tensor, numbers: list[int], host: torch.Tensor) -> int:
        """Return how many cells do not hold what their host pages do, or are not where the table says.

        ``numbers``: host pages of the request; ``host`` as `column_check.differing`."""
        kv, lists, page = self._cells.places.pool, self.lists, host.shape[4]
        cells = self._cells.within(column_pages)
        entries = self._cells.held[cells].long()
        full = entries >= 0
        cells, entries = cells[full].cpu(), entries[full].cpu()
        told = self._cells.of.cpu()
        bad = told[entries] != cells
        own = self._cells.within(torch.tensor(numbers)).cpu()
        bad_entries = int((told[own] >= 0).sum()) - len(cells)
        rows = host[entries // lists, :, entries % lists // kv.kv_heads, entries % kv.kv_heads]
        for number in (cells % lists).unique().tolist():
            here = (cells % lists == number).nonzero().flatten()
            slots = cells[here, None] // lists * page + torch.arange(page)
            for half, buffers in enumerate((kv.k, kv.v)):
                kept = buffers[number // kv.kv_heads][slots.to(kv.device), number % kv.kv_heads].cpu()
                bad[here] |= (kept != rows[here, half]).flatten(1).any(-1)
        return int(bad.sum()) + abs(bad_entries)
