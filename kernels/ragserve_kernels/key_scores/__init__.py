"""Scores of one query per head against keys at scattered slots, for several requests. See README.md."""

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
    starts: torch.Tensor,
    width: int,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``scale * q . k`` of every query head and slot of each of R requests, summed in float32: float32
    ``[R, query_heads, width]``, -inf behind a request's own slots. Nothing waits for the device.

    Args:
        q: ``[R, query_heads, head_dim]``, of any strides but the last.
        k: ``[pool slots, kv_heads, head_dim]``, of any strides but the last. Of another dtype than ``q``
            it is scored in plain torch.
        slots: int64 ``[n]``, one request's after another's. Values are not checked.
        starts: int32 ``[R + 1]``, the place of each request's first slot, and ``n``. Values are not checked.
        width: most slots of a request, or more.
        scale: default 1 / sqrt(head_dim).
        out: contiguous; allocated by default.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check("q", q, FLOAT_DTYPES, (None, None, None))
    requests, heads, dim = q.shape
    check("k", k, k.dtype, (None, None, dim), like=q)
    check("slots", slots, torch.int64, (None,), like=q, dense=True)
    check("starts", starts, torch.int32, (requests + 1,), like=q, dense=True)
    query_group(heads, k.shape[1])
    if out is None:
        out = torch.empty(requests, heads, width, dtype=torch.float32, device=q.device)
    check("out", out, torch.float32, (requests, heads, width), like=q, dense=True)
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    if not out.numel():
        return out
    if use_triton(q) and q.dtype == k.dtype and dim in HEAD_DIMS:
        from ragserve_kernels.key_scores.triton import key_scores_triton

        key_scores_triton(q, k, slots, starts, out, scale=scale)
    else:
        key_scores_naive(q, k, slots, starts, out, scale=scale)
    return out
