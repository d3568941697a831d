"""Extends of requests whose prompt is on the host: their tokens attend apart from the rest of the pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection
from ragserve_kernels.sparse_decode import sparse_decode
from sglang_ext.attention.decode.backend import SparseDecodeBackend
from sglang_ext.attention.decode.decode_state import DecodeState, KeptSelection
from sglang_ext.attention.decode.observed_queries import ObservedQueries
from sglang_ext.attention.decode.page_stats import PageStatistics
from sglang_ext.attention.decode.progressive_attention import ProgressiveToken, listed
from sglang_ext.attention.decode.step_planner import Selects, StepPlanner
from sglang_ext.attention.offload.lagged_selection import LaggedSelection
from sglang_ext.attention.offload.streamed_attention import StreamedTokens
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.documents.context_reader import ContextReader, PieceMemory
from sglang_ext.kv_offload.host.host_reader import HostReader
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.versions import row_of


@dataclass(eq=False, slots=True)
class SparseToken:
    """The one new token of a request that was retracted: it reads the pages that its step would have read.

    Attributes:
        place: of the token among the new tokens of the pass.
        batch: the request alone.
        selection: its selection in all layers, ``[layers, kv_heads, n]`` and ``[layers, kv_heads]``.
        layers: how many have attended so far.
    """

    place: int
    batch: PagedBatch
    selection: PageSelection
    layers: int = 0

    def attend(self, q: torch.Tensor, out: torch.Tensor, kv: KVPair, layer: int, scale: float) -> None:
        """Overwrite the token's row of ``out``; ``q`` and ``out`` ``[new tokens, heads, head_dim]``."""
        own = slice(self.place, self.place + 1)
        chosen = PageSelection(self.selection.blocks[layer][None], self.selection.counts[layer][None])
        out[own] = sparse_decode(q[own].contiguous(), kv, self.batch, selection=chosen, scale=scale)
        self.layers += 1


@dataclass(eq=False, slots=True)
class _Extended:
    """A request of the extend at hand.

    Attributes:
        row: None if its prompt is on the device.
        tokens: up to the end of the extend.
        last: place of its last new token in the pass.
        part: what attends apart; None if nothing does.
        selects: whether its last query selects pages at the end of the pass, and for which steps.
        observes: its last query counts in the mean of a window.
        query: that query, once the pass has shown it.
    """

    req: Any
    state: DecodeState
    row: OffloadedRow | None
    tokens: int
    last: int
    part: SparseToken | ProgressiveToken | StreamedTokens | None = None
    selects: Selects = Selects.NO
    observes: bool = False
    query: ObservedQueries = field(default_factory=ObservedQueries)

    @property
    def is_asked(self) -> bool:
        """Return True if its last query is to be noted."""
        return self.observes or self.selects is not Selects.NO

    def observe(self) -> None:
        """Take its last query into the mean of the window, as a decode step would."""
        if self.observes and self.query.shown is not None:
            self.state.queries.take(self.query.shown.mean, self.state.options.window)


class OffloadedExtends:
    """Extends of offloaded requests, and the first selections of those with a lag. Scheduler thread only."""

    def __init__(
        self,
        planner: StepPlanner,
        backend: SparseDecodeBackend,
        offloaded: OffloadedRows,
        lagged: LaggedSelection,
        statistics: PageStatistics,
    ) -> None:
        self._planner = planner
        self._backend = backend
        self._offloaded = offloaded
        self._prefixes = HostPrefixes(offloaded)
        self._lagged = lagged
        self._statistics = statistics
        self._page = statistics.page_size
        self._extended: list[_Extended] = []
        self._memory: PieceMemory | None = None  # of the pass at hand

    @property
    def asked(self) -> tuple[tuple[ObservedQueries, int, int], ...]:
        """Those whose newest query is to be noted in this pass, as in `Step.asked`."""
        return tuple((each.query, each.last, 1) for each in self._extended if each.is_asked)

    @property
    def parts(self) -> tuple[SparseToken | ProgressiveToken | StreamedTokens, ...]:
        """What attends apart in this pass."""
        return tuple(each.part for each in self._extended if each.part is not None)

    def before(self, reqs: Sequence[Any], spans: Sequence[tuple[int, int]]) -> None:
        """Prepare the extend of ``reqs``, in the order of its tokens. ``spans``: of each the first new token
        and the end."""
        self.drop()
        place = 0
        for req, (start, end) in zip(reqs, spans, strict=True):
            place += end - start
            state = self._planner.state(req)
            row = state.offload.row
            each = _Extended(req, state, row, end, place - 1)
            if row is not None and state.kept is not None:
                self._go_on(each, row, state.kept)
            else:
                if row is not None:
                    self._question(each, row, end - start)
                each.selects = self._planner.selects_early(req, end)
            if each.part is not None or each.is_asked:
                self._extended.append(each)

    def _go_on(self, each: _Extended, row: OffloadedRow, kept: KeptSelection) -> None:
        """Let a request that was retracted have its next step as this extend, by the selection it had."""
        state = each.state
        state.counts.resumed += 1
        self._enter(each, row)
        swapped, each.selects, is_new = self._planner.again(each.req, each.tokens)
        if swapped:
            self._lagged.swap(kept, reads=True)
        self._lagged.read_again(row, kept)
        if state.options.mode == "progressive":
            each.part = self._progressive(each, row)
        else:
            selection = self._backend.widened(kept.current, state)
            each.part = SparseToken(each.last, self._pages(each, scored=False), selection)
        each.observes = is_new and state.options.chooses_by_window

    def _progressive(self, each: _Extended, row: OffloadedRow) -> ProgressiveToken:
        # it ranks the pages that are back on the device, too, and they are where they were not before
        back = row_of(each.req), row.pages * self._page + 1, each.tokens - 1
        self._statistics.after_extend([back])
        batch, scored = self._pages(each, scored=False), self._pages(each, scored=True)
        places = batch.page_table.clone()
        places[0, : row.pages] = -1 - row.host
        heads = places[:, None].expand(-1, self._offloaded.kv.kv_heads, -1)
        attention, threshold = self._backend.progressive, each.state.options.threshold
        return ProgressiveToken(each.last, attention, batch, scored, heads, threshold)

    def _question(self, each: _Extended, row: OffloadedRow, count: int) -> None:
        """Let what follows the prompt's host pages, or a part of it, attend to them."""
        if each.state.offload.prefix is not None:
            self._enter(each, row)
        begin = row.pages * self._page
        slots = self._offloaded.table[row.request, begin : each.tokens].long()
        reader: HostReader | ContextReader = HostReader(self._offloaded.pages, row.host)
        if row.context is not None:
            where = self._offloaded.first_host + row.host.long()
            self._memory = self._memory or PieceMemory(self._offloaded.kv, self._page)
            reader = ContextReader(row.context, self._memory, self._offloaded.statistics, where)
        each.part = StreamedTokens(each.last + 1 - count, count, reader, slots)

    def _enter(self, each: _Extended, row: OffloadedRow) -> None:
        self._prefixes.enter(row, row_of(each.req), each.state.offload.enter().tail)

    def _pages(self, each: _Extended, *, scored: bool) -> PagedBatch:
        """The request alone, with its pages; ``scored``: those where their statistics lie."""
        request, width = row_of(each.req), self._offloaded.statistics_of.shape[1]
        pages = self._statistics.pages_of(request, width)
        if scored and each.row is not None:
            pages[: each.row.pages] = self._offloaded.statistics_of[request, : each.row.pages]
        lens = torch.tensor([each.tokens], dtype=torch.int32).to(pages.device, non_blocking=True)
        return PagedBatch(pages[None], lens, self._page)

    def after(self) -> None:
        """Choose pages for the steps that follow, and load what that takes; the pass has been launched.

        Raises:
            IntegrityError: the pass did not attend by our backend.
        """
        extended = self._extended
        self.drop()
        for each in extended:
            if each.part is not None and each.part.layers != self._offloaded.kv.layers:
                raise IntegrityError("a pass over offloaded requests went past the attention backend")
            each.observe()
            if each.selects is Selects.NEXT:
                self._choose_first(each)
            elif each.selects is Selects.LATER:
                self._lagged.chosen(each.state, self._selection(each))
            elif each.state.selection.pending_from and each.state.kept is not None:
                pending = each.state.kept.pending_named
                if pending is not None:
                    self._lagged.chosen(each.state, pending)  # its resident blocks are gone

    def _choose_first(self, each: _Extended) -> None:
        if each.query.shown is None and each.row is None:
            return  # the question was in another pass: its first decode step chooses
        kept = self._lagged.first(each.state, self._selection(each))
        self._planner.chosen_early(each.req, each.tokens)
        if each.row is not None:
            self._lagged.read_again(each.row, kept)

    def _selection(self, each: _Extended) -> PageSelection:
        if isinstance(each.part, ProgressiveToken):
            return each.part.listed(-(-each.tokens // self._page), self._backend.capacity)
        by = each.query.shown
        if each.state.options.observe != "last" and each.state.queries.shown is not None:
            by = each.state.queries.shown
        if by is None:
            raise IntegrityError("a pass over offloaded requests showed no queries")
        chosen = self._backend.choose(by.mean, self._pages(each, scored=True), each.state.options)
        if each.state.options.mode == "progressive":
            return listed(chosen.blocks, chosen.counts, chosen.counts[..., None])
        return chosen

    def drop(self) -> None:
        """Forget the pass at hand: it is over, or has failed."""
        self._extended, self._memory = [], None
