"""Summary of a document, kept at ingestion, per block: mean, min and max K, mean local Q, and SamKV's static
attention analysis (A.1).
"""

from __future__ import annotations

import math

import torch

from ragserve_kernels.block_summary.naive import block_summary_naive
from ragserve_kernels.block_summary.pieces import StaticAttention, static_attention
from ragserve_kernels.block_summary.plan import BlockPlan, BlockSummary, default_block_tokens
from ragserve_kernels.dispatch import FLOAT_DTYPES, check, use_triton
from ragserve_kernels.kv import check_head_dim, query_group

__all__ = [
    "BlockPlan",
    "BlockSummary",
    "StaticAttention",
    "block_summary",
    "block_summary_naive",
    "default_block_tokens",
    "static_attention",
]


def block_summary(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    lse: torch.Tensor | None = None,
) -> BlockSummary:
    """Summarise one layer of a batch of documents, each attending causally to itself alone.

    Nothing waits for the device, so a CUDA graph can capture the call for a fixed plan.

    Args:
        q: ``[tokens, query_heads, head_dim]``, rotated, the documents one after another as in ``plan``.
        k: ``[tokens, kv_heads, head_dim]``, the same dtype, rotated.
        plan: on the device of ``q``.
        scale: of the scores; default 1 / sqrt(head_dim).
        lse: float32 ``[query_heads, tokens]``: the natural log-sum-exp of each query's scores, if the
            prefill's attention kept it. It saves half of the work.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check("q", q, FLOAT_DTYPES, (plan.tokens, None, None))
    check_head_dim(q.shape[2])
    check("k", k, q.dtype, (plan.tokens, None, q.shape[2]), like=q)
    query_group(q.shape[1], k.shape[1])
    check("plan", plan.doc_start, torch.int32, (None,), like=q)
    if lse is not None:
        check("lse", lse, torch.float32, (q.shape[1], plan.tokens), like=q, dense=True)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    if use_triton(q) and plan.tokens:
        from ragserve_kernels.block_summary.launches import block_summary_triton

        return block_summary_triton(q, k, plan, scale=scale, lse=lse)
    return block_summary_naive(q, k, plan, scale=scale, precision=torch.float32)
