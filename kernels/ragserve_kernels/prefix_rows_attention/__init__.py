"""The recompute pass: queries of many requests, each row attending to the first ``row_len`` of its request's
kept slots.
"""

from __future__ import annotations

import math

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, INT_DTYPES, check, use_triton
from ragserve_kernels.kv import check_head_dim, query_group
from ragserve_kernels.prefix_rows_attention.naive import prefix_rows_attention_naive

__all__ = ["prefix_rows_attention", "prefix_rows_attention_naive"]


def prefix_rows_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    slot_start: torch.Tensor,
    row_start: torch.Tensor,
    row_len: torch.Tensor,
    *,
    max_rows: int,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one layer for all requests of a batch.

    Slots are sorted by position, so causality is a length (SamKV, section 3.3).

    Args:
        q: ``[rows, query_heads, head_dim]``; the rows of request b are row_start[b] to row_start[b + 1]. Any
            order is right; sorted by ``row_len`` is fast.
        k, v: ``[pool slots, kv_heads, head_dim]``, this layer of the pool.
        slots: int32 or int64 ``[total]``: the kept slots of all requests.
        slot_start: int32 or int64 ``[requests]``: where the slots of each request begin.
        row_start: int32 or int64 ``[requests + 1]``. Rows from row_start[requests] on are padding, whose
            output is not written.
        row_len: int32 ``[rows]``: how many of its request's first slots a row attends to, that is the layer's
            kept tokens at positions up to the row's own. 0 gives a zero row. Slot values and lengths are not
            checked.
        max_rows: at least the most rows of any request: a launch size, known on the host; a captured graph
            keeps it.
        scale: of the scores; default 1 / sqrt(head_dim).
        out: like ``q``, contiguous; allocated by default.
        lse: float32 ``[rows, query_heads]``, contiguous; receives the natural log-sum-exp of each row's
            scaled scores, -inf for a row without slots, so that keys outside the pool can be folded in.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check("q", q, FLOAT_DTYPES, (None, None, None))
    check_head_dim(q.shape[2])
    check("k", k, q.dtype, (None, None, q.shape[2]), like=q)
    check("v", v, q.dtype, k.shape, like=q)
    query_group(q.shape[1], k.shape[1])
    check("slots", slots, INT_DTYPES, (None,), like=q)
    check("slot_start", slot_start, INT_DTYPES, (None,), like=q)
    check("row_start", row_start, INT_DTYPES, (slot_start.shape[0] + 1,), like=q)
    check("row_len", row_len, torch.int32, (q.shape[0],), like=q)
    if max_rows < 0:
        raise ValueError(f"max_rows is {max_rows}; expected 0 or more.")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check("out", out, q.dtype, q.shape, like=q, dense=True)
    if lse is not None:
        check("lse", lse, torch.float32, q.shape[:2], like=q, dense=True)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    if not scale > 0:
        raise ValueError(f"scale is {scale}; expected more than 0.")
    if q.shape[0] == 0 or slot_start.shape[0] == 0 or max_rows == 0:
        return out
    if use_triton(q):
        from ragserve_kernels.prefix_rows_attention.triton import prefix_rows_attention_triton

        prefix_rows_attention_triton(
            q, k, v, slots, slot_start, row_start, row_len, out, lse, max_rows=max_rows, scale=scale
        )
    else:
        prefix_rows_attention_naive(
            q, k, v, slots, slot_start, row_start, row_len, out, lse, scale=scale, precision=torch.float32
        )
    return out
