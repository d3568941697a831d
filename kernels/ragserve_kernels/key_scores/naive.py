"""The truth of ``key_scores`` in plain torch."""

from __future__ import annotations

import torch


def key_scores_naive(
    q: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """See :func:`ragserve_kernels.key_scores.key_scores`."""
    grouped = q.float().unflatten(0, (k.shape[1], -1))  # [kv_heads, group, head_dim]
    scores = torch.einsum("hgd,nhd->hgn", grouped, k[slots].float()) * scale
    out.copy_(scores.flatten(0, 1))
