"""Compares columns with the host pages that they hold."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers
from sglang_ext.hosting.cells import CellTable
from sglang_ext.hosting.hosted_row import HostedRow


def differing(row: HostedRow, kv: KVLayers, host: torch.Tensor) -> int:
    """Return how many columns of a request do not hold what their host pages do, in some head.

    ``kv``: SGLang's pool; ``host``: ``[pages, 2 (K, V), layers, kv_heads, page, head_dim]``."""
    if row.table is None or row.column_pages is None:
        return 0
    if isinstance(row.table, CellTable):
        return row.table.differing(row.column_pages, row.numbers, host)
    page = host.shape[4]
    bad = torch.zeros(row.table.held.shape[1:], dtype=torch.bool)  # [kv_heads, columns]
    within = torch.arange(page, device=row.column_pages.device)
    slots = row.column_pages.long()[:, None] * page + within  # [columns, page]
    for layer in range(kv.layers):
        held = row.table.held[layer].cpu()
        slots = slots[: held.shape[1]]  # columns that it loses hold nothing that is looked up
        numbers = row.host.cpu()[held.clamp_min(0).long()].long()  # [kv_heads, columns]
        head = torch.arange(len(held))[:, None]
        for half, buffer in enumerate((kv.k[layer], kv.v[layer])):
            kept = buffer[slots].permute(2, 0, 1, 3).cpu()  # [kv_heads, columns, page, head_dim]
            differs = (kept != host[numbers, half, layer, head]).flatten(2).any(-1)
            bad |= differs & (held >= 0)
    return int(bad.sum())
