"""Resident blocks of offloaded progressive requests as one pool over all layers and KV heads (PSA's unified
memory).

A *shared block* is the place of a page in one layer and KV head of SGLang's pool. In the shared blocks of a
request's resident blocks any page of any of its layers and heads may be, so one that attends to many pages
takes what others leave. Attention finds pages by a table of all host pages, which is changed on the stream of
the forward passes: what is to be overwritten leaves it before its load begins, and what is loaded enters it
once it is there. For a step, attention may fill shared blocks instead: what it reads from the host and is to
be in a shared block it writes there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.progressive_decode import SharedPages
from ragserve_kernels.shared_assign import (
    SharedMoves,
    SharedState,
    shared_arrive,
    shared_assign,
    shared_expect,
    shared_rest,
)
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.resident.resident_blocks import EMPTY, RECENT

_LARGEST = 2**31


class SharedBlocks:
    """Which shared block holds which page, of one rank. Nothing waits for the device.

    Attributes:
        lists: layers times KV heads.
        of, held, used: as those of `ragserve_kernels.shared_assign.SharedState`.
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
                "and KV heads, are too many: lower kv_offload_bytes or kv_offload_tokens, or use larger pages"
            )
        self.of = torch.full((none + 1,), EMPTY, dtype=torch.int32, device=kv.device)
        self.held = torch.full((nowhere + 1,), EMPTY, dtype=torch.int32, device=kv.device)
        self.used = torch.zeros_like(self.held)
        self.places = SharedPages(self.of[:-1].view(host_pages, kv.layers, kv.kv_heads), kv)
        self._dropped: list[torch.Tensor] = []

    def within(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the shared blocks of pages of the pool, int64."""
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
            shared_blocks = self.within(pages)
            entries = self.held[shared_blocks].long()
            self.of.index_fill_(0, entries.masked_fill_(entries < 0, len(self.of) - 1), EMPTY)
            self.held.index_fill_(0, shared_blocks, EMPTY)
            self.used.index_fill_(0, shared_blocks, 0)
        self._dropped.clear()


class SharedTable:
    """The shared blocks of one request. Pages of the latest selection stay, then those named last."""

    def __init__(self, shared_blocks: SharedBlocks, resident_blocks: int, pages: int, selection: int) -> None:
        """``pages``: logical pages that a selection may name, from 0. ``selection``: how many a layer and
        head names of its own, in the mean, that count as its working set."""
        self._shared_blocks = shared_blocks
        self._selection = selection * shared_blocks.lists
        named = torch.zeros(
            pages * shared_blocks.lists + 1, dtype=torch.int32, device=shared_blocks.of.device
        )
        self._state = SharedState(shared_blocks.of, shared_blocks.held, shared_blocks.used, named)
        self._moves: SharedMoves | None = None
        self._expected = False  # attention may fill the shared blocks of these moves
        self._own = named[:0].long()  # shared blocks of `_pages`
        self._pages: torch.Tensor | None = None
        self.resident_blocks = resident_blocks
        self.selections = 0

    @property
    def lists(self) -> int:
        return self._shared_blocks.lists

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `assign` reads and writes, for other streams than that of the constructor."""
        return self._state.named, self._own

    def assign(
        self, selection: PageSelection, host: torch.Tensor, resident_pages: torch.Tensor
    ) -> SharedMoves:
        """Give pages shared blocks, as many as there are, and take those out of the table that get others:
        see `shared_assign`, whose first arguments these are.

        ``resident_pages``: int32 ``[at least resident_blocks]``: pages of the pool."""
        self.rest()
        self.selections += 1
        if self._pages is not resident_pages or len(self._own) != self.resident_blocks * self.lists:
            self._pages, self._own = (
                resident_pages,
                self._shared_blocks.within(resident_pages[: self.resident_blocks]),
            )
        numbers = {"number": self.selections, "counted": self._selection, "recent": RECENT}
        selection = PageSelection(selection.blocks.contiguous(), selection.counts.contiguous())
        self._moves = shared_assign(selection, self._state, host, self._own, **numbers)
        return self._moves

    def expect(self) -> None:
        """Let attention write the pages of the latest selection that it reads from the host to their shared
        blocks.
        """
        if self._moves is not None:
            shared_expect(self._moves, self._state)
            self._expected = True

    def rest(self) -> SharedMoves | None:
        """End that, and return what has not been written meanwhile; None if nothing was expected."""
        if self._moves is None or not self._expected:
            return None
        self._moves, self._expected = shared_rest(self._moves, self._state), False
        return self._moves

    def arrive(self) -> None:
        """Note that the pages of the latest selection are in their shared blocks.

        Raises:
            IntegrityError: attention may still fill them.
        """
        if self._expected:
            raise IntegrityError("shared_blocks are to be filled that nothing has been loaded into")
        if self._moves is not None:
            shared_arrive(self._moves, self._state)
            self._moves = None

    def resize(self, resident_blocks: int) -> None:
        """Use so many resident blocks from the next selection on; those that go are to be dropped."""
        self.resident_blocks = resident_blocks

    def drop(self, resident_pages: torch.Tensor) -> None:
        """Forget what these resident blocks hold: see `SharedBlocks.drop`."""
        self._shared_blocks.drop(resident_pages)

    def tallied(self, tally: torch.Tensor) -> tuple[int, int, int, int, int]:
        """As `ResidentTable.tallied`; the working set is the mean of all layers and heads, as they share."""
        hits, misses, _, named = tally.tolist()
        return hits, misses, 0, named, -(-named // self.lists)

    def filled(self, tally: torch.Tensor) -> int:
        """Return how many pages attention has written to their shared blocks."""
        return int(tally[2])

    def differing(
        self,
        resident_pages: torch.Tensor,
        numbers: list[int],
        page: int,
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> int:
        """Return how many shared blocks do not hold what their host pages do, or are not where the table
        says.

        ``numbers``: pages of the request, of ``page`` tokens; ``read`` returns what entries, int64 [n], have
        on the host: ``[n, 2 (K, V), page, head_dim]``."""
        kv, lists = self._shared_blocks.places.pool, self.lists
        shared_blocks = self._shared_blocks.within(resident_pages)
        entries = self._shared_blocks.held[shared_blocks].long()
        # what is on its way, and was not written by attention, is not there yet
        full = (entries >= 0) & (self._shared_blocks.of[entries] != -2 - shared_blocks)
        shared_blocks, entries = shared_blocks[full].cpu(), entries[full].cpu()
        told = self._shared_blocks.of.cpu()
        bad = told[entries] != shared_blocks
        own = self._shared_blocks.within(torch.tensor(numbers)).cpu()
        bad_entries = int((told[own] >= 0).sum()) - len(shared_blocks)
        rows = read(entries)
        for number in (shared_blocks % lists).unique().tolist():
            here = (shared_blocks % lists == number).nonzero().flatten()
            slots = shared_blocks[here, None] // lists * page + torch.arange(page)
            for half, buffers in enumerate((kv.k, kv.v)):
                kept = buffers[number // kv.kv_heads][slots.to(kv.device), number % kv.kv_heads].cpu()
                bad[here] |= (kept != rows[here, half]).flatten(1).any(-1)
        return int(bad.sum()) + abs(bad_entries)
