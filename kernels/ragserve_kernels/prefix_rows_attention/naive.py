"""The truth of ``prefix_rows_attention`` in plain torch."""

from __future__ import annotations

import math

import torch


def prefix_rows_attention_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    slot_start: torch.Tensor,
    row_start: torch.Tensor,
    row_len: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    scale: float,
    precision: torch.dtype = torch.float64,
) -> None:
    """See :func:`ragserve_kernels.prefix_rows_attention.prefix_rows_attention`; scores and sums are in
    ``precision``.
    """
    group = q.shape[1] // k.shape[1]
    starts, bounds = slot_start.tolist(), row_start.tolist()
    for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
        lengths = row_len[first:last]
        if first == last:
            continue
        own = slots[start : start + int(lengths.max())].long()
        keys = k[own].to(precision).repeat_interleave(group, 1)
        values = v[own].to(precision).repeat_interleave(group, 1)
        scores = torch.einsum("rhd,khd->hrk", q[first:last].to(precision), keys) * scale
        beyond = torch.arange(len(own), device=q.device)[None, :] >= lengths[:, None]
        scores = scores.masked_fill(beyond, -math.inf)
        if lse is not None:
            lse[first:last] = scores.logsumexp(-1).T
        weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row without keys: 0 / 0
        out[first:last] = torch.einsum("hrk,khd->rhd", weights, values).to(out.dtype)
