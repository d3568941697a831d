"""The truth of ``context_gather`` in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers


def context_gather_naive(
    host: torch.Tensor,
    dst: KVLayers,
    tokens: torch.Tensor,
    turns: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    first_layer: int = 0,
) -> None:
    """See :func:`ragserve_kernels.context_gather.context_gather`."""
    block, page, half = host.shape[4], tokens.shape[1], turns.shape[2]
    within = torch.arange(page, device=source.device)
    used = source >= 0
    for layer in range(dst.layers):
        head, entry = used[layer].nonzero(as_tuple=True)
        there = tokens[source[layer, head, entry].long()].long()  # [n, page, 2]
        slots = target[layer, head, entry].long()[:, None] * page + within
        row, of = there[..., 0].cpu(), head[:, None].cpu()
        k, v = (
            host[row // block, part, first_layer + layer, of, row % block].to(dst.device) for part in (0, 1)
        )
        cos, sin = turns[there[..., 1]].unbind(-2)
        x1, x2, rest = k[..., :half].float(), k[..., half : 2 * half].float(), k[..., 2 * half :]
        turned = (x1 * cos - x2 * sin).to(k.dtype), (x2 * cos + x1 * sin).to(k.dtype)
        dst.k[layer][slots, head[:, None]] = torch.cat((*turned, rest), -1)
        dst.v[layer][slots, head[:, None]] = v
