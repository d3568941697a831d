"""Reads layers of a composed context out of its documents' host pages for one attention, in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats
from sglang_ext.hosting.context_pages import ContextPages
from sglang_ext.hosting.host_reader import PIECE_BYTES

_PROGRAMS = 8  # of a launch: decode steps do not run beside it


class ContextReader:
    """Brings K and V of a layer to the device, keys at their positions, on the current stream. The first time
    it makes the statistics of the layer's pages on the way."""

    def __init__(
        self, context: ContextPages, like: KVLayers, statistics: PageStats, where: torch.Tensor
    ) -> None:
        """``like``: the pool. ``where``: int64 [pages]: where the pages' statistics go."""
        self._context = context
        self._like = like
        self._statistics = statistics
        self._where = where
        self._buffer: KVLayers | None = None

    def pieces(self, layer: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield K and V ``[kv_heads, n, head_dim]`` of consecutive tokens, at most ``tokens`` of them but at
        least a page. The next piece overwrites them."""
        page, count, heads = self._context.page_size, self._context.count, self._like.kv_heads
        buffer = self._buffer_of(min(tokens // page, count))
        size = buffer.slots // page
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

    def _buffer_of(self, pages: int) -> KVLayers:
        """Return memory for at most so many pages of one layer, at least one."""
        page, like = self._context.page_size, self._like
        page_bytes = 2 * page * like.kv_heads * like.head_dim * like.dtype.itemsize
        pages = max(1, min(pages, PIECE_BYTES // page_bytes))
        if self._buffer is None or self._buffer.slots > pages * page:
            shape = pages * page, like.kv_heads, like.head_dim
            self._buffer = KVLayers(
                *([torch.empty(shape, dtype=like.dtype, device=like.device)] for _ in "kv")
            )
        return self._buffer
