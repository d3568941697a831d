"""Paged decode attention over blocks chosen per request and KV head (LServe, 3.6). See README.md."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection, check_attention, check_selection
from ragserve_kernels.sparse_decode import naive
from ragserve_kernels.sparse_decode.types import FULL, SELECTED, STREAMING, HeadKinds

__all__ = ["FULL", "SELECTED", "STREAMING", "HeadKinds", "sparse_decode"]


def sparse_decode(
    q: torch.Tensor,
    kv: KVPair,
    batch: PagedBatch,
    *,
    selection: PageSelection | None = None,
    heads: HeadKinds | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Attend one decode step: full, selected and streaming heads of a ragged batch in one launch.

    The call can be captured in a CUDA graph: nothing waits for the device, and the launch depends on shapes
    only.

    Args:
        q: ``[batch, heads, head_dim]``.
        kv: K and V of the layer, ``[slots, kv_heads, head_dim]`` each, in q's dtype or quantised.
        batch: the requests' pages and lengths.
        selection: the blocks that SELECTED heads attend to, distinct, in any order; negative ones are
            skipped.
        heads: the kind of each KV head. Default: all SELECTED if there is a selection, else all FULL.
        scale: of the scores; default 1 / sqrt(head_dim).
        out: like q, contiguous; allocated by default.
        lse: float32 ``[batch, heads]``; receives the natural log-sum-exp of the scores, -inf without tokens.
        programs: of the launch; default from the device.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError: shapes, sizes, dtypes or devices that do not fit.
    """
    bits = check_attention(q, kv, batch)
    kv_heads = kv[0].shape[1]
    if selection is not None:
        check_selection(selection, q, kv_heads)
    if heads is not None:
        shape = (kv_heads,) if heads.kinds.dim() == 1 else (batch.size, kv_heads)
        check("kinds", heads.kinds, torch.int32, shape, like=q)
        if heads.sink_tokens < 0 or heads.local_tokens < 0:
            raise ValueError(
                f"sink_tokens and local_tokens are {heads.sink_tokens} and {heads.local_tokens}; "
                "expected 0 or more."
            )
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    check("out", out, q.dtype, q.shape, like=q, dense=True)
    if lse is not None:
        check("lse", lse, torch.float32, q.shape[:2], like=q, dense=True)
    if not batch.size:
        return out
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    if use_triton(q):
        from ragserve_kernels.sparse_decode import triton as kernels

        kernels.sparse_decode(
            q,
            kv,
            batch,
            out,
            lse,
            selection=selection,
            heads=heads,
            scale=scale,
            programs=programs,
            bits=bits,
        )
        return out
    attended, logs = naive.sparse_decode(q, kv, batch, selection=selection, heads=heads, scale=scale)
    if lse is not None:
        lse.copy_(logs)
    return out.copy_(attended)
