"""The truth of ``shared_gather`` in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers


def shared_gather_naive(
    host: torch.Tensor, dst: KVLayers, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor
) -> None:
    """See :func:`ragserve_kernels.shared_gather.shared_gather`."""
    page, heads, lists = host.shape[4], dst.kv_heads, dst.layers * dst.kv_heads
    n = int(count)
    taken, shared_blocks = source[:n].long().cpu(), target[:n].long().cpu()
    rows = host[taken // lists, :, taken % lists // heads, taken % heads]  # [n, 2, page, head_dim]
    within = torch.arange(page)
    for number in (shared_blocks % lists).unique().tolist():
        here = shared_blocks % lists == number
        slots = (shared_blocks[here, None] // lists * page + within).to(dst.device)
        for half, buffers in enumerate((dst.k, dst.v)):
            buffer = buffers[number // heads]
            buffer[slots, number % heads] = rows[here, half].to(buffer.device)
