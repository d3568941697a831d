"""Compares columns with the host pages that they hold."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers
from sglang_ext.hosting.cells import CellTable
from sglang_ext.hosting.context_pages import ContextPages
from sglang_ext.hosting.hosted_row import HostedRow


def differing(row: HostedRow, kv: KVLayers, host: torch.Tensor) -> int:
    """Return how many columns of a request do not hold what their host pages do, in some head.

    ``kv``: SGLang's pool; ``host``: ``[pages, 2 (K, V), layers, kv_heads, page, head_dim]``, of the requests'
    own pages."""
    if row.table is None or row.column_pages is None:
        return 0
    if isinstance(row.table, CellTable):
        return row.table.differing(row.column_pages, row.numbers, host)
    page = host.shape[4]
    bad = torch.zeros(row.table.held.shape[1:], dtype=torch.bool)  # [kv_heads, columns]
    within = torch.arange(page, device=row.column_pages.device)
    slots = row.column_pages.long()[:, None] * page + within  # [columns, page]
    for layer in range(kv.layers):
        held = row.table.held[layer]
        slots = slots[: held.shape[1]]  # columns that it loses hold nothing that is looked up
        if row.context is None:
            wanted = _own(row, held.cpu(), host, layer)
        else:
            wanted = _of_documents(row.context, held, kv, layer)
        for want, buffer in zip(wanted, (kv.k[layer], kv.v[layer]), strict=True):
            kept = buffer[slots].permute(2, 0, 1, 3).cpu()  # [kv_heads, columns, page, head_dim]
            bad |= (kept != want).flatten(2).any(-1) & (held >= 0).cpu()
    return int(bad.sum())


def _own(row: HostedRow, held: torch.Tensor, host: torch.Tensor, layer: int) -> list[torch.Tensor]:
    numbers = row.host.cpu()[held.clamp_min(0).long()].long()  # [kv_heads, columns]
    head = torch.arange(len(held))[:, None]
    return [host[numbers, half, layer, head] for half in (0, 1)]


def _of_documents(context: ContextPages, held: torch.Tensor, kv: KVLayers, layer: int) -> list[torch.Tensor]:
    """Load them once more, into memory like the pool's."""
    (heads, columns), page = held.shape, context.page_size
    shape = columns * page, heads, kv.head_dim
    into = KVLayers(*([torch.zeros(shape, dtype=kv.dtype, device=kv.device)] for _ in "kv"))
    target = torch.arange(columns, dtype=torch.int32, device=kv.device).expand(1, heads, columns)
    context.gather(into, held[None].contiguous(), target.contiguous(), first_layer=layer)
    return [each[0].view(columns, page, heads, -1).permute(2, 0, 1, 3).cpu() for each in (into.k, into.v)]
