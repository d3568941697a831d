"""The truth of ``page_stats`` in plain torch, layer by layer."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats.types import PageStats


def page_stats(kv: KVLayers, pages: torch.Tensor, into: PageStats, page_size: int) -> None:
    """See :func:`ragserve_kernels.page_stats.page_stats`."""
    chosen = pages[pages >= 0].long()
    slots = chosen[:, None] * page_size + torch.arange(page_size, device=pages.device)
    for layer in range(kv.layers):
        into.store(layer, chosen, kv.k[layer][slots])
