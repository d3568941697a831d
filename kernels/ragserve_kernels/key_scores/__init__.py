"""Scores of one query per head against keys at scattered slots. See README.md."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, check, use_triton
from ragserve_kernels.key_scores.naive import key_scores_naive
from ragserve_kernels.kv import HEAD_DIMS, query_group

__all__ = ["key_scores", "key_scores_naive"]


def key_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``scale * q . k`` of every query head and slot, summed in float32. Nothing waits for the device.

    Args:
        q: ``[query_heads, head_dim]``.
        k: ``[pool slots, kv_heads, head_dim]``, of any strides but the last. Of another dtype than ``q``
            it is scored in plain torch.
        slots: int64 ``[n]``. Values are not checked.
        scale: default 1 / sqrt(head_dim).
        out: contiguous float32 ``[query_heads, n]``; allocated by default.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check("q", q, FLOAT_DTYPES, (None, None))
    check("k", k, k.dtype, (None, None, q.shape[1]), like=q)
    check("slots", slots, torch.int64, (None,), like=q, dense=True)
    query_group(q.shape[0], k.shape[1])
    if out is None:
        out = torch.empty(q.shape[0], len(slots), dtype=torch.float32, device=q.device)
    check("out", out, torch.float32, (q.shape[0], len(slots)), like=q, dense=True)
    scale = 1.0 / math.sqrt(q.shape[1]) if scale is None else scale
    if not len(slots):
        return out
    if use_triton(q) and q.dtype == k.dtype and q.shape[1] in HEAD_DIMS:
        from ragserve_kernels.key_scores.triton import key_scores_triton

        key_scores_triton(q, k, slots, out, scale=scale)
    else:
        key_scores_naive(q, k, slots, out, scale=scale)
    return out
