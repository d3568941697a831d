"""Reads layers of a composed context out of its documents' host pages for one attention, in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.host.host_reader import PIECE_BYTES

_PROGRAMS = 8  # of a launch: decode steps do not run beside it


class PieceMemory:
    """Memory for one piece of a layer, at most `PIECE_BYTES`, as pages of the pool are. All readers of a pass
    share it: they read one after the other, on one stream."""

    def __init__(self, like: KVLayers, page: int) -> None:
        """``like``: the pool. ``page``: tokens of its pages."""
        self.like = like
        self.most = max(1, PIECE_BYTES // (2 * page * like.kv_heads * like.head_dim * like.dtype.itemsize))
        """Pages of a piece."""
        self._page = page
        self._buffer: KVLayers | None = None

    def of(self, pages: int) -> KVLayers:
        """Return one layer of so many pages, at least."""
        slots, like = pages * self._page, self.like
        if self._buffer is None or self._buffer.slots < slots:
            self._buffer = None  # its memory may be taken for the larger one
            shape = slots, like.kv_heads, like.head_dim
            self._buffer = KVLayers(
                *([torch.empty(shape, dtype=like.dtype, device=like.device)] for _ in "kv")
            )
        return self._buffer


class ContextReader:
    """Brings K and V of a layer to the device, keys at their positions, on the current stream. The first time
    it makes the statistics of the layer's pages on the way."""

    def __init__(
        self, context: ContextPages, memory: PieceMemory, statistics: PageStats, where: torch.Tensor
    ) -> None:
        """``memory``: that the pieces go to. ``where``: int64 [pages]: where the pages' statistics go."""
        self._context = context
        self._memory = memory
        self._statistics = statistics
        self._where = where

    def pieces(self, layer: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield K and V ``[kv_heads, n, head_dim]`` of consecutive tokens, at most ``tokens`` of them but at
        least a page. The next piece of any reader overwrites them."""
        page, count, heads = self._context.page_size, self._context.count, self._memory.like.kv_heads
        size = max(1, min(tokens // page, count, self._memory.most))
        buffer = self._memory.of(size)
        numbers = self._context.tensors[2]
        is_new = layer >= self._context.described
        for first in range(0, count, size):
            some = numbers[first : first + size]
            source, target = (each.expand(1, heads, -1).contiguous() for each in (some, numbers[: len(some)]))
            self._context.gather(buffer, source, target, first_layer=layer, programs=_PROGRAMS)
            k, v = (half[0][: len(some) * page] for half in (buffer.k, buffer.v))
            if is_new:
                keys = k.unflatten(0, (len(some), page))
                self._statistics.store(layer, self._where[first : first + size], keys)
            yield k.transpose(0, 1), v.transpose(0, 1)
        if is_new:
            self._context.described = layer + 1
