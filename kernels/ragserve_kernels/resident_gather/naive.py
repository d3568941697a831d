"""The truth of ``resident_gather`` in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers


def resident_gather_naive(
    host: torch.Tensor, dst: KVLayers, source: torch.Tensor, target: torch.Tensor
) -> None:
    """See :func:`ragserve_kernels.resident_gather.resident_gather`."""
    page = host.shape[4]
    within = torch.arange(page, device=source.device)
    used = source >= 0
    for layer in range(dst.layers):
        head, entry = used[layer].nonzero(as_tuple=True)
        slots = target[layer, head, entry].long()[:, None] * page + within  # [n, page]
        for half, buffer in enumerate((dst.k[layer], dst.v[layer])):
            rows = host[source[layer, head, entry].long().cpu(), half, layer, head.cpu()]
            buffer[slots, head[:, None]] = rows.to(buffer.device)
