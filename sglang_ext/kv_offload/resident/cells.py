"""Columns of hosted progressive requests as one pool over all layers and KV heads (PSA's unified memory).

A *cell* is the place of a page in one layer and KV head of SGLang's pool. In the cells of a request's columns
any page of any of its layers and heads may be, so one that attends to many pages takes what others leave.
Attention finds pages by a table of all host pages, which is changed on the stream of the forward passes: what
is to be overwritten leaves it before its load begins, and what is loaded enters it once it is there. For a
step, attention may fill cells instead: what it reads from the host and is to be in a cell it writes there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ragserve_kernels.cell_assign import (
    CellMoves,
    CellState,
    cell_arrive,
    cell_assign,
    cell_expect,
    cell_rest,
)
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.progressive_decode import PageCells
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.resident.columns import EMPTY, RECENT

_LARGEST = 2**31


class Cells:
    """Which cell holds which page, of one rank. Nothing waits for the device.

    Attributes:
        lists: layers times KV heads.
        of, held, used: as those of `ragserve_kernels.cell_assign.CellState`.
    """

    def __init__(self, kv: KVLayers, page_size: int, host_pages: int) -> None:
        """``kv``: SGLang's pool. ``host_pages``: numbers of pages.

        Raises:
            ValueError: more pages than numbers of 32 bits.
        """
        self.lists = kv.layers * kv.kv_heads
        none, nowhere = host_pages * self.lists, kv.slots // page_size * self.lists
        if max(none, nowhere) >= _LARGEST:
            raise ValueError(
                f"{host_pages} host pages or {kv.slots // page_size} of the KV pool, in {self.lists} layers "
                "and KV heads, are too many: lower kv_hosted_bytes or kv_hosted_tokens, or take larger pages"
            )
        self.of = torch.full((none + 1,), EMPTY, dtype=torch.int32, device=kv.device)
        self.held = torch.full((nowhere + 1,), EMPTY, dtype=torch.int32, device=kv.device)
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
            self.of.index_fill_(0, entries.masked_fill_(entries < 0, len(self.of) - 1), EMPTY)
            self.held.index_fill_(0, cells, EMPTY)
            self.used.index_fill_(0, cells, 0)
        self._dropped.clear()


class CellTable:
    """The cells of one request. Pages of the latest choice stay, then those named last."""

    def __init__(self, cells: Cells, columns: int, pages: int, choice: int) -> None:
        """``pages``: logical pages that a choice may name, from 0. ``choice``: how many a layer and head
        names of its own, in the mean, that count as its working set."""
        self._cells = cells
        self._choice = choice * cells.lists
        named = torch.zeros(pages * cells.lists + 1, dtype=torch.int32, device=cells.of.device)
        self._state = CellState(cells.of, cells.held, cells.used, named)
        self._moves: CellMoves | None = None
        self._expected = False  # attention may fill the cells of these moves
        self._own = named[:0].long()  # cells of `_pages`
        self._pages: torch.Tensor | None = None
        self.columns = columns
        self.choices = 0

    @property
    def lists(self) -> int:
        return self._cells.lists

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `assign` reads and writes, for other streams than that of the constructor."""
        return self._state.named, self._own

    def assign(self, choice: PageSelection, host: torch.Tensor, column_pages: torch.Tensor) -> CellMoves:
        """Give pages cells, as many as there are, and take those out of the table that get others: see
        `cell_assign`, whose first arguments these are.

        ``column_pages``: int32 ``[at least columns]``: pages of the pool."""
        self.rest()
        self.choices += 1
        if self._pages is not column_pages or len(self._own) != self.columns * self.lists:
            self._pages, self._own = column_pages, self._cells.within(column_pages[: self.columns])
        numbers = {"number": self.choices, "counted": self._choice, "recent": RECENT}
        choice = PageSelection(choice.blocks.contiguous(), choice.counts.contiguous())
        self._moves = cell_assign(choice, self._state, host, self._own, **numbers)
        return self._moves

    def expect(self) -> None:
        """Let attention write the pages of the latest choice that it reads from the host to their cells."""
        if self._moves is not None:
            cell_expect(self._moves, self._state)
            self._expected = True

    def rest(self) -> CellMoves | None:
        """End that, and return what has not been written meanwhile; None if nothing was expected."""
        if self._moves is None or not self._expected:
            return None
        self._moves, self._expected = cell_rest(self._moves, self._state), False
        return self._moves

    def arrive(self) -> None:
        """Note that the pages of the latest choice are in their cells.

        Raises:
            IntegrityError: attention may still fill them.
        """
        if self._expected:
            raise IntegrityError("cells are to be filled that nothing has been loaded into")
        if self._moves is not None:
            cell_arrive(self._moves, self._state)
            self._moves = None

    def resize(self, columns: int) -> None:
        """Use so many columns from the next choice on; those that go are to be dropped."""
        self.columns = columns

    def drop(self, column_pages: torch.Tensor) -> None:
        """Forget what these columns hold: see `Cells.drop`."""
        self._cells.drop(column_pages)

    def tallied(self, tally: torch.Tensor) -> tuple[int, int, int, int, int]:
        """As `ColumnTable.tallied`; the working set is the mean of all layers and heads, as they share."""
        hits, misses, _, named = tally.tolist()
        return hits, misses, 0, named, -(-named // self.lists)

    def filled(self, tally: torch.Tensor) -> int:
        """Return how many pages attention has written to their cells."""
        return int(tally[2])

    def differing(
        self,
        column_pages: torch.Tensor,
        numbers: list[int],
        page: int,
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> int:
        """Return how many cells do not hold what their host pages do, or are not where the table says.

        ``numbers``: pages of the request, of ``page`` tokens; ``read`` returns what entries, int64 [n], have
        on the host: ``[n, 2 (K, V), page, head_dim]``."""
        kv, lists = self._cells.places.pool, self.lists
        cells = self._cells.within(column_pages)
        entries = self._cells.held[cells].long()
        # what is on its way, and was not written by attention, is not there yet
        full = (entries >= 0) & (self._cells.of[entries] != -2 - cells)
        cells, entries = cells[full].cpu(), entries[full].cpu()
        told = self._cells.of.cpu()
        bad = told[entries] != cells
        own = self._cells.within(torch.tensor(numbers)).cpu()
        bad_entries = int((told[own] >= 0).sum()) - len(cells)
        rows = read(entries)
        for number in (cells % lists).unique().tolist():
            here = (cells % lists == number).nonzero().flatten()
            slots = cells[here, None] // lists * page + torch.arange(page)
            for half, buffers in enumerate((kv.k, kv.v)):
                kept = buffers[number // kv.kv_heads][slots.to(kv.device), number % kv.kv_heads].cpu()
                bad[here] |= (kept != rows[here, half]).flatten(1).any(-1)
        return int(bad.sum()) + abs(bad_entries)
