"""Device tables of a decode step, at fixed addresses so that a CUDA graph can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragserve_kernels.paged import PagedBatch, PageSelection
from ragserve_kernels.sparse_decode import FULL, SELECTED, STREAMING
from sglang_ext.attention.decode.decode_state import Row
from sglang_ext.attention.decode.progressive_attention import listed
from sglang_ext.attention.decode.step_planner import Step


@dataclass(frozen=True, slots=True)
class TableShape:
    """Sizes of one rank's tables.

    ``pages``: of the longest request. ``capacity``: pages of the largest budget, and one that may join
    them. ``lags``: rows may choose pages for later steps than the next. ``pool_pages``: of the pool;
    statistics of host page p are those of page ``pool_pages + p``. ``dense_layers``: read everything."""

    layers: int
    heads: int
    kv_heads: int
    pages: int
    capacity: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    lags: bool = False
    pool_pages: int = 0
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableRows:
    """The tables' first n rows, as views; see :class:`StepTables` for shapes."""

    batch: PagedBatch
    ranked: PagedBatch  # the progressive rows only: others have length 0
    index: torch.Tensor
    counts: torch.Tensor
    kinds: torch.Tensor
    by_rank: torch.Tensor
    queries: torch.Tensor
    used: torch.Tensor
    weight: torch.Tensor
    budgets: torch.Tensor
    active: torch.Tensor
    exact: torch.Tensor
    shares: torch.Tensor
    thresholds: torch.Tensor
    scored: PagedBatch  # with the pages whose statistics stand for the rows' pages
    wanted: torch.Tensor
    wanted_counts: torch.Tensor
    lagged: torch.Tensor
    ranked_scored: PagedBatch  # those of `ranked`, likewise
    from_host: torch.Tensor
    places: torch.Tensor

    def wanted_selection(self, layers: int | slice) -> PageSelection:
        """Return the pages chosen for steps after a lag."""
        return PageSelection(self.wanted[layers], self.wanted_counts[layers])

    def selection(self, layer: int | slice) -> PageSelection:
        """Return the pages chosen for one layer or several."""
        return PageSelection(self.index[layer], self.counts[layer])


class StepTables:
    """Tables for up to ``size`` rows.

    Rows past a batch are FULL ones: what a graph's padding attends to is one dummy token."""

    def __init__(
        self, size: int, shape: TableShape, device: torch.device, pattern: torch.Tensor | None
    ) -> None:
        layers, kv_heads = shape.layers, shape.kv_heads

        def zeros(*dims: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*dims, dtype=dtype, device=device)

        self.size = size
        self._shape = shape
        self._pattern = pattern  # bool [layers, kv_heads]: streaming heads
        self.pages = zeros(size, shape.pages)  # page numbers of each request
        self.lens = zeros(size)
        self.ranked_lens = zeros(size)  # of progressive rows; 0 for others
        self.index = zeros(layers, size, kv_heads, shape.capacity)
        self.counts = zeros(layers, size, kv_heads)
        self.kinds = zeros(layers, size, kv_heads)
        self.by_rank = zeros(layers, size, kv_heads)  # 1: the head attends progressively
        # what pages are chosen by: the latest query, or a mean of queries
        self.queries = zeros(layers, size, shape.heads, shape.head_dim, dtype=shape.dtype)
        self.shares = torch.ones(size, 1, 1, dtype=shape.dtype, device=device)  # of a step's query in it
        self._shares: tuple[float, ...] = ()
        lagging = size if shape.lags else 0
        self.scored_pages = zeros(lagging, shape.pages) if lagging else self.pages
        self.wanted = zeros(layers, size, kv_heads, shape.capacity) if lagging else self.index
        self.wanted_counts = zeros(layers, size, kv_heads) if lagging else self.counts
        self.lagged = zeros(size)
        self._lagged_rows: tuple[bool, ...] = ()
        self.used = zeros(layers, size, kv_heads)
        self.weight = zeros(layers, size, shape.heads, dtype=torch.float32)
        self.from_host = zeros(layers, size, kv_heads)  # pages of progressive heads read from the host
        self.places = zeros(lagging, shape.pages)  # where pages are: in the pool, or -1 - page on the host
        self._rows = zeros(4, size)
        self._moves = zeros(2, size)
        self._limits: tuple[int, ...] = ()  # pages of each row's budget
        self.budgets, self._kind, self._streaming, self.progressive = self._rows.unbind(0)
        self.thresholds = torch.ones(size, dtype=torch.float32, device=device)
        self.active = zeros(size)  # rows that choose by bounds in this step
        self.exact = zeros(size)  # rows that choose by their keys
        self._active_rows: tuple[bool, ...] = ()
        self._views: dict[int, TableRows] = {}  # by n, at most `size`

    def rows(self, n: int) -> TableRows:
        """Return the first ``n`` rows. They are checked when first asked for, not in every layer."""
        if n not in self._views:
            by_layer = (
                *("index", "counts", "kinds", "by_rank", "queries", "used", "weight"),
                *("wanted", "wanted_counts", "from_host"),
            )
            by_row = (*("budgets", "active", "exact", "shares", "thresholds", "lagged", "places"),)
            self._views[n] = TableRows(
                PagedBatch(self.pages[:n], self.lens[:n], self._shape.page_size),
                PagedBatch(self.pages[:n], self.ranked_lens[:n], self._shape.page_size),
                **{name: getattr(self, name)[:, :n] for name in by_layer},
                **{name: getattr(self, name)[:n] for name in by_row},
                scored=PagedBatch(self.scored_pages[:n], self.lens[:n], self._shape.page_size),
                ranked_scored=PagedBatch(self.scored_pages[:n], self.ranked_lens[:n], self._shape.page_size),
            )
        return self._views[n]

    def set_step(self, step: Step) -> None:
        """Set what a step needs but for lengths and pages, which :meth:`set_lengths` sets."""
        if step.changed:
            self.set_rows(step.rows, step.kept)
        self.open_pages({i: row.state.selection.newest for i, row in enumerate(step.rows) if step.opened[i]})
        self.set_active(step)
        self.set_shares(step.shares)
        self.set_lagged(step)

    def set_rows(self, rows: tuple[Row, ...], kept: tuple[int, ...] = ()) -> None:
        """Set the rows' kinds and limits, for other requests or other ones of them sparse.

        ``kept``: per row, its place before. Pages chosen for it move along; with -1 they are forgotten."""
        page = self._shape.page_size
        values = torch.zeros(4, self.size, dtype=torch.int32)
        thresholds = torch.ones(self.size)
        for i, row in enumerate(rows):
            options = row.state.options
            values[0, i] = min(options.budget // page, self._shape.capacity - 1)
            values[1, i] = SELECTED if row.sparse else FULL
            values[2, i] = row.streaming
            values[3, i] = row.progressive
            thresholds[i] = options.threshold
        self._limits = tuple(values[0, : len(rows)].tolist())
        self._copy(values, self._rows)
        self._copy(thresholds, self.thresholds)
        self._move(kept)
        for i, row in enumerate(rows):
            shown = row.state.queries.shown
            if shown is not None and (i >= len(kept) or kept[i] < 0):
                self.queries[:, i].copy_(shown.mean)
        self.kinds.copy_(self._kind[None, :, None].expand_as(self.kinds))
        self.by_rank.copy_(self.progressive[None, :, None].expand_as(self.by_rank))
        if self._pattern is not None:
            stream = self._pattern[:, None, :] & (self._streaming > 0)[None, :, None]
            self.kinds.masked_fill_(stream, STREAMING)
            self.by_rank.masked_fill_(stream, 0)
        for i, row in enumerate(rows if self._shape.dense_layers else ()):
            if row.hierarchical:
                self.kinds[list(self._shape.dense_layers), i] = FULL
        self._active_rows = ()

    def set_active(self, step: Step) -> None:
        """Set which rows choose their pages in this step, and the pages that no query chooses."""
        active = step.active
        if active != self._active_rows:
            chosen = list(zip(step.rows, active, strict=True))
            self._copy_flags([now and not (row.exact or row.recent) for row, now in chosen], self.active)
            self._copy_flags([now and row.exact and not row.recent for row, now in chosen], self.exact)
            self._active_rows = active
        for i, row in enumerate(step.rows):
            if row.recent and active[i]:
                self._set_recent(i, row.state.selection.newest)

    def set_shares(self, shares: tuple[float, ...]) -> None:
        """Set the share of this step's query in the mean that each row's pages are chosen by."""
        if shares != self._shares:
            values = torch.ones(self.size, 1, 1, dtype=self.shares.dtype)
            values[: len(shares), 0, 0] = torch.tensor(shares, dtype=values.dtype)
            self._copy(values, self.shares)
            self._shares = shares

    def set_lagged(self, step: Step) -> None:
        """Set which rows choose pages by bounds at the end of this step, for steps after a lag."""
        if not self._shape.lags:
            return
        lagged = tuple(now and row.hierarchical for row, now in zip(step.rows, step.lagged, strict=True))
        if lagged != self._lagged_rows:
            self._copy_flags(lagged, self.lagged)
            self._lagged_rows = lagged

    def place(self, row: int, selection: PageSelection, opened: int | None) -> None:
        """Let a row read other pages than in the step before.

        ``selection``: in all layers, [layers, kv_heads, capacity] and [layers, kv_heads]. ``opened``: a page
        that began since they were chosen."""
        self.index[:, row].copy_(selection.blocks)
        self.counts[:, row].copy_(selection.counts)
        if opened is not None:
            self.open_pages({row: opened})

    def listed(self, row: int, most: int) -> PageSelection:
        """Return the pages for shared blocks of a progressive row, by its latest step: see `listed`."""
        return listed(self.wanted[:, row], self.used[:, row], most)

    def taken(self, row: int, *, wanted: bool) -> PageSelection:
        """Return a copy of what a row reads, or of what it has chosen for later steps."""
        if wanted:
            return PageSelection(self.wanted[:, row].clone(), self.wanted_counts[:, row].clone())
        return PageSelection(self.index[:, row].clone(), self.counts[:, row].clone())

    def adopt(self, other: StepTables) -> None:
        """Take over the pages of smaller tables, and the queries that choose; rows keep their places."""
        for name in ("index", "counts", "queries"):
            getattr(self, name)[:, : other.size].copy_(getattr(other, name))

    def open_pages(self, pages: dict[int, int]) -> None:
        """Append to the pages chosen for a row, by row, a page that begins."""
        for row, page in pages.items():
            count = self._limits[row]
            self.index[:, row, :, count] = page
            self.counts[:, row] = count + 1

    def set_lengths(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        longest: int | None,
        offloaded_statistics: torch.Tensor | None = None,
    ) -> None:
        """Set lengths and pages.

        Args:
            req_to_token: SGLang's request table, int32 ``[requests, tokens]``: slots.
            rows: ``[n]``: the requests' rows of it.
            lens: ``[n]``: tokens of each request.
            longest: of the lengths, if the host knows it.
            offloaded_statistics: int32 ``[requests, pages]``: where statistics of offloaded pages lie; -1:
                with the page itself. None: no row has a prompt on the host whose statistics or pages this
                step reads.
        """
        n, page = len(rows), self._shape.page_size
        self.lens[:n].copy_(lens)
        torch.mul(self.lens[:n], self.progressive[:n], out=self.ranked_lens[:n])
        width = self._shape.pages if longest is None else min(-(-longest // page), self._shape.pages)
        first_slots = req_to_token[:, : width * page : page].index_select(0, rows)
        pages = first_slots // page
        self.pages[:n, : first_slots.shape[1]].copy_(pages)
        if not self._shape.lags:
            return
        scored = places = pages
        if offloaded_statistics is not None:
            offloaded = offloaded_statistics[:, :width].index_select(0, rows)
            scored = torch.where(offloaded < 0, pages, offloaded)
            places = torch.where(offloaded < 0, pages, self._shape.pool_pages - 1 - offloaded)
        self.scored_pages[:n, : first_slots.shape[1]].copy_(scored)
        self.places[:n, : first_slots.shape[1]].copy_(places)

    def _set_recent(self, row: int, newest: int) -> None:
        """Let a row read its first page and the newest ones, as many as its budget has."""
        count = min(self._limits[row], newest + 1)
        pages = torch.arange(newest - count + 1, newest + 1, dtype=torch.int32, device=self.index.device)
        pages[0] = 0
        self.index[:, row, :, :count] = pages
        self.counts[:, row] = count

    def _move(self, kept: tuple[int, ...]) -> None:
        """Let rows take their pages and the mean of their queries along; other rows have neither."""
        if all(place < 0 for place in kept):
            self.counts.zero_()
            self.queries.zero_()
            return
        places = torch.zeros(2, self.size, dtype=torch.int32)
        places[0, : len(kept)] = torch.tensor(kept, dtype=torch.int32).clamp_min(0)
        places[1, : len(kept)] = torch.tensor([place >= 0 for place in kept], dtype=torch.int32)
        self._copy(places, self._moves)
        source, is_kept = self._moves.unbind(0)
        self.index.copy_(self.index.index_select(1, source))
        self.counts.copy_(self.counts.index_select(1, source) * is_kept[None, :, None])
        # padding rows may have left anything
        moved = self.queries.index_select(1, source)
        self.queries.copy_(moved.masked_fill_((is_kept == 0)[None, :, None, None], 0))

    def _copy_flags(self, flags: Sequence[bool], target: torch.Tensor) -> None:
        values = torch.zeros(self.size, dtype=torch.int32)
        values[: len(flags)] = torch.tensor(flags, dtype=torch.int32)
        self._copy(values, target)

    def _copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from a fresh pinned buffer: an earlier step's may still be in flight."""
        target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
