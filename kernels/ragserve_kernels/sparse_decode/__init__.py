"""Paged decode attention over an index table, per request and KV head (LServe, section 3.6). See README.md."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.dispatch import (
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
    use_triton,
)
from ragserve_kernels.paged import KV, check_index, check_paged
from ragserve_kernels.sparse_decode import naive
from ragserve_kernels.sparse_decode.naive import FULL, SELECTED, STREAMING

__all__ = ["FULL", "SELECTED", "STREAMING", "sparse_decode"]


def sparse_decode(
    q: torch.Tensor,
    k: KV,
    v: KV,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    block_size: int | None = None,
    index: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    kinds: torch.Tensor | None = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """One decode step of attention: full, selected and streaming heads of a ragged batch in one launch (and a
    small one that merges splits).

    ``q`` [batch, heads, head_dim]; ``k``, ``v`` [slots, kv_heads, head_dim] of q's dtype, or
    :class:`QuantizedKV`; ``page_table`` int32 [batch, max_pages]: physical pages, slot = page * page_size +
    offset; only pages that hold a token are read. ``seq_lens`` int32 [batch]: tokens of each request, the
    newest included; 0 gives a zero output.

    ``block_size``: tokens of a block, the unit of ``index`` and of the sink and local parts; default: a page.
    ``index`` int32 [batch, kv_heads, capacity]: the logical blocks that a SELECTED head attends to, distinct,
    in any order, negative ones skipped; ``counts`` int32 [batch, kv_heads]: how many of them count. ``kinds``
    int32 [kv_heads], or [batch, kv_heads] where requests differ: FULL, SELECTED or STREAMING; without it all
    heads are SELECTED if ``index`` is given, else FULL. A streaming head attends to the blocks that hold its
    first ``sink_tokens`` and last ``local_tokens`` tokens.

    ``scale``: of the scores, default 1/sqrt(head_dim). ``out``: like q, and ``lse`` float32 [batch, heads]
    (natural log-sum-exp of the scores, -inf without tokens) are written where given. ``programs``: of the
    launch, default from the device. Nothing here waits for the device, and the launch's shape depends on
    arguments' shapes only: it can be captured in a CUDA graph. Returns ``out``."""
    block_size = block_size or page_size
    _, bits = check_paged(q, k, v, page_table, seq_lens, page_size=page_size, block_size=block_size)
    batch, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if (index is None) != (counts is None):
        raise ValueError("index and counts go together: both or neither.")
    if index is not None and counts is not None:
        check_index(index, counts, batch, kv_heads)
        check_same_device(q, index=index, counts=counts)
    if kinds is not None:
        check_dtype("kinds", kinds, (torch.int32,))
        check_shape("kinds", kinds, (kv_heads,) if kinds.dim() == 1 else (batch, kv_heads))
        check_last_contiguous("kinds", kinds)
        check_same_device(q, kinds=kinds)
    if sink_tokens < 0 or local_tokens < 0:
        raise ValueError(
            f"sink_tokens and local_tokens are {sink_tokens} and {local_tokens}; expected 0 or more."
        )
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    check_dtype("out", out, (q.dtype,))
    check_shape("out", out, (batch, heads, head_dim))
    if not out.is_contiguous():
        raise ValueError("out must be contiguous.")
    if lse is not None:
        check_dtype("lse", lse, (torch.float32,))
        check_shape("lse", lse, (batch, heads))
        if not lse.is_contiguous():
            raise ValueError("lse must be contiguous.")
    if not batch:
        return out
    if use_triton(q):
        from ragserve_kernels.sparse_decode import triton as kernels

        kernels.sparse_decode(
            q,
            k,
            v,
            page_table,
            seq_lens,
            out,
            lse,
            page_size=page_size,
            block_size=block_size,
            index=index,
            counts=counts,
            kinds=kinds,
            sink_tokens=sink_tokens,
            local_tokens=local_tokens,
            scale=scale,
            programs=programs,
            bits=bits,
        )
        return out
    got, logs = naive.sparse_decode(
        q,
        k,
        v,
        page_table,
        seq_lens,
        page_size=page_size,
        block_size=block_size,
        index=index,
        counts=counts,
        kinds=kinds,
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        scale=scale,
    )
    if lse is not None:
        lse.copy_(logs)
    return out.copy_(got)
