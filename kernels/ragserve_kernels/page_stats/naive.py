"""The truth of ``page_stats`` in plain torch, layer by layer."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats.types import PageStats


def page_stats(kv: KVLayers, pages: torch.Tensor, into: PageStats, page_size: int) -> None:
    """See :func:`ragserve_kernels.page_stats.page_stats`."""
    chosen = pages[pages >= 0].long()
    per = into.per_page
    rows = (chosen[:, None] * per + torch.arange(per, device=pages.device)).flatten()
    slots = chosen[:, None] * page_size + torch.arange(page_size, device=pages.device)
    for layer in range(kv.layers):
        k = kv.k[layer][slots]  # [n, page_size, kv_heads, head_dim]
        runs = k.view(len(rows), page_size // per, kv.kv_heads, kv.head_dim)
        into.k_min[layer, rows] = runs.amin(1)
        into.k_max[layer, rows] = runs.amax(1)
        into.k_center[layer, chosen] = ((k.amin(1).float() + k.amax(1).float()) / 2).to(k.dtype)
