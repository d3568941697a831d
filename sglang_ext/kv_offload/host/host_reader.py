"""Reads layers of host pages for one attention, in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ragserve_kernels.gather_h2d import gather_h2d
from sglang_ext.kv_offload.host.host_pages import HostPages

PIECE_BYTES = 64 * 2**20  # of K and V of a layer, on the device at a time


class HostReader:
    """Brings K and V of a layer of a request's host pages to the device, on the current stream."""

    def __init__(self, pages: HostPages, host: torch.Tensor) -> None:
        """``host``: int32 [n]: the request's pages, in order, on the device that reads them."""
        self._shape = pages.shape
        # a block: what one head has of a page
        self._arena = pages.pool.view(-1, self._shape.block, self._shape.head_dim)
        self._host = host.long()

    def pieces(self, layer: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield K and V ``[kv_heads, n, head_dim]`` of consecutive tokens, at most ``tokens`` of them."""
        size, heads = self._shape.block, self._shape.kv_heads
        head_bytes = self._shape.page_bytes // self._shape.layers
        step = max(1, min(tokens // size, PIECE_BYTES // head_bytes))
        half = torch.arange(2, device=self._host.device)[:, None, None]
        head = torch.arange(heads, device=self._host.device)[:, None]
        for some in self._host.split(step):
            index = ((some * 2 + half) * self._shape.layers + layer) * heads + head  # [2, heads, pages]
            out = torch.empty(
                (index.numel(), *self._arena.shape[1:]), dtype=self._arena.dtype, device=index.device
            )
            flat = torch.arange(index.numel(), device=index.device)
            gather_h2d([self._arena], [out], index.flatten(), flat)
            k, v = out.view(2, heads, len(some) * size, -1)
            yield k, v
