"""Device tables of a decode step, at fixed addresses so that a CUDA graph can read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.sparse_decode import FULL, SELECTED, STREAMING
from sglang_ext.attention.step_planner import Row


@dataclass(frozen=True, slots=True)
class TableShape:
    """Of one rank: ``pages`` that the longest request has, ``capacity`` pages of the largest budget and one
    that may join them.
    """

    layers: int
    heads: int
    kv_heads: int
    pages: int
    capacity: int
    page_size: int
    head_dim: int
    dtype: torch.dtype


class StepTables:
    """Tables for up to ``size`` rows. Rows past a batch are FULL ones: what a graph's padding attends to is
    one dummy token.
    """

    def __init__(
        self, size: int, shape: TableShape, device: torch.device, pattern: torch.Tensor | None
    ) -> None:
        layers, kv_heads = shape.layers, shape.kv_heads

        def zeros(*dims: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*dims, dtype=dtype, device=device)

        self.size = size
        self._shape = shape
        self._pattern = pattern  # bool [layers, kv_heads]
        self.pages = zeros(size, shape.pages)  # page numbers of each request
        self.lens = zeros(size)
        self.ranked_lens = zeros(size)  # of progressive rows; 0 for others
        self.index = zeros(layers, size, kv_heads, shape.capacity)
        self.counts = zeros(layers, size, kv_heads)
        self.kinds = zeros(layers, size, kv_heads)
        self.by_rank = zeros(layers, size, kv_heads)  # 1: the head attends progressively
        self.queries = zeros(
            layers, size, shape.heads, shape.head_dim, dtype=shape.dtype
        )  # of a step at whose end pages are chosen
        self.used = zeros(layers, size, kv_heads)
        self.weight = zeros(layers, size, shape.heads, dtype=torch.float32)
        self._rows = zeros(4, size)
        self._places = zeros(2, size)
        self._limits: tuple[int, ...] = ()  # pages of each row's budget
        self.budgets, self._kind, self._streaming, self.progressive = self._rows.unbind(0)
        self.thresholds = torch.ones(size, dtype=torch.float32, device=device)
        self.active = zeros(size)
        self._active_now: tuple[bool, ...] = ()

    def set_rows(self, rows: tuple[Row, ...], kept: tuple[int, ...] = ()) -> None:
        """Other requests, or other ones of them sparse: their kinds and limits; the pages chosen for rows
        that were at ``kept`` move along, all others are forgotten."""
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
        self.kinds.copy_(self._kind[None, :, None].expand_as(self.kinds))
        self.by_rank.copy_(self.progressive[None, :, None].expand_as(self.by_rank))
        if self._pattern is not None:
            stream = self._pattern[:, None, :] & (self._streaming > 0)[None, :, None]
            self.kinds.masked_fill_(stream, STREAMING)
            self.by_rank.masked_fill_(stream, 0)
        self._active_now = ()

    def set_active(self, active: tuple[bool, ...]) -> None:
        """Which rows choose their pages in this step."""
        if active != self._active_now:
            values = torch.zeros(self.size, dtype=torch.int32)
            values[: len(active)] = torch.tensor(active, dtype=torch.int32)
            self._copy(values, self.active)
            self._active_now = active

    def adopt(self, other: StepTables) -> None:
        """Hold the pages chosen in smaller tables, whose rows keep their places."""
        self.index[:, : other.size].copy_(other.index)
        self.counts[:, : other.size].copy_(other.counts)

    def open_pages(self, pages: dict[int, int]) -> None:
        """By row: the page that joins those chosen, after the last of them."""
        for row, page in pages.items():
            count = self._limits[row]
            self.index[:, row, :, count] = page
            self.counts[:, row] = count + 1

    def set_lengths(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, longest: int | None
    ) -> None:
        """Lengths and pages of requests that hold ``rows`` [n] of the request table; ``longest`` of them
        where the host knows it.
        """
        n, page = len(rows), self._shape.page_size
        self.lens[:n].copy_(lens)
        torch.mul(self.lens[:n], self.progressive[:n], out=self.ranked_lens[:n])
        width = self._shape.pages if longest is None else min(-(-longest // page), self._shape.pages)
        first_slots = req_to_token[:, : width * page : page].index_select(0, rows)
        self.pages[:n, : first_slots.shape[1]].copy_(first_slots // page)

    def _move(self, kept: tuple[int, ...]) -> None:
        if all(place < 0 for place in kept):
            self.counts.zero_()
            return
        places = torch.zeros(2, self.size, dtype=torch.int32)
        places[0, : len(kept)] = torch.tensor(kept, dtype=torch.int32).clamp_min(0)
        places[1, : len(kept)] = torch.tensor([place >= 0 for place in kept], dtype=torch.int32)
        self._copy(places, self._places)
        source, is_kept = self._places.unbind(0)
        self.index.copy_(self.index.index_select(1, source))
        self.counts.copy_(self.counts.index_select(1, source) * is_kept[None, :, None])

    def _copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """From a fresh pinned copy: an earlier step's may still be on its way."""
        target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
