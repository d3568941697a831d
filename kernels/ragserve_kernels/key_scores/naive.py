"""The truth of ``key_scores`` in plain torch."""

from __future__ import annotations

import torch


def key_scores_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """See :func:`ragserve_kernels.key_scores.key_scores`."""
    out.fill_(-torch.inf)
    bounds = starts.tolist()
    for number, (query, own) in enumerate(zip(q, out, strict=True)):
        keys = k[slots[bounds[number] : bounds[number + 1]]].float()
        grouped = query.float().unflatten(0, (k.shape[1], -1))  # [kv_heads, group, head_dim]
        own[:, : len(keys)] = (torch.einsum("hgd,nhd->hgn", grouped, keys) * scale).flatten(0, 1)
