"""The truth of ``block_summary`` in plain torch: the whole attention matrix of each document."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from ragserve_kernels.block_summary.plan import BlockPlan, BlockSummary

TINY = 1e-30  # a weight that underflows to 0 has no logarithm


def block_summary_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    precision: torch.dtype = torch.float64,
    token: torch.Tensor | None = None,
) -> BlockSummary:
    """See :func:`ragserve_kernels.block_summary.block_summary`; computed in ``precision``.

    ``token``: int32 [blocks], fits these tokens instead of each block's most attended one (to compare fits
    where two tokens nearly tie)."""
    device, (blocks, heads, dim) = q.device, (plan.blocks, k.shape[1], k.shape[2])
    mean_k, min_k, max_k = (torch.zeros(blocks, heads, dim, device=device) for _ in range(3))
    local_q = torch.zeros(plan.documents, q.shape[1], dim, device=device)
    received = torch.zeros(plan.tokens, device=device)
    chosen = torch.full((blocks,), -1, dtype=torch.int32, device=device)
    attention, exponent = (torch.full((blocks,), math.inf, device=device) for _ in range(2))
    outlier = torch.zeros(blocks, dtype=torch.bool, device=device)
    tables = (plan.block_start, plan.doc_start, plan.doc_block)
    block_start, doc_start, doc_block = (table.tolist() for table in tables)
    for b, (first, last) in enumerate(pairwise(block_start)):
        keys = k[first:last].to(precision)
        mean_k[b], min_k[b], max_k[b] = keys.mean(0), keys.amin(0), keys.amax(0)
    for d, local in enumerate(plan.local_start.tolist()):
        start, end = doc_start[d], doc_start[d + 1]
        if start == end:
            continue
        local_q[d] = q[local:end].to(precision).mean(0)
        # [sampled, n], strictly later queries
        weights = sampled_weights(q[start:end], k[start:end], plan.query_stride, scale, precision)
        queries = torch.arange(len(weights), device=device) * plan.query_stride + plan.query_stride - 1
        later = (queries[:, None] > torch.arange(end - start, device=device)[None, :]).sum(0)
        received[start:end] = weights.sum(0)
        mean = torch.where(later >= plan.min_queries, weights.sum(0) / later.clamp(min=1), -math.inf)
        own = slice(doc_block[d], doc_block[d + 1])
        for b in range(own.start, own.stop):
            first, last = block_start[b] - start, block_start[b + 1] - start
            best = first + int(mean[first:last].argmax()) if token is None else int(token[b]) - start
            if best < 0 or mean[best] == -math.inf:
                continue
            chosen[b], attention[b] = start + best, mean[best]
            distance = (queries - best)[queries > best].to(precision).log()
            height = weights[queries > best, best].clamp(min=TINY).log()
            distance -= distance.mean()
            exponent[b] = -(distance * (height - height.mean())).sum() / (distance * distance).sum()
        outlier[own] = outliers(exponent[own].to(precision))
    return BlockSummary(mean_k, min_k, max_k, local_q, received, chosen, attention, exponent, outlier)


def sampled_weights(
    q: torch.Tensor, k: torch.Tensor, stride: int, scale: float, precision: torch.dtype
) -> torch.Tensor:
    """``[sampled queries, n]``: causal attention averaged over query heads; zero at and after the query's own
    position.
    """
    n = len(k)
    rows = torch.arange(n // stride, device=q.device) * stride + stride - 1
    keys = k.to(precision).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("rhd,khd->hrk", q[rows].to(precision), keys) * scale
    columns = torch.arange(n, device=q.device)
    weights = torch.softmax(scores.masked_fill(columns[None, :] > rows[:, None], -math.inf), -1).mean(0)
    return weights.masked_fill(columns[None, :] >= rows[:, None], 0.0)


def outliers(exponent: torch.Tensor) -> torch.Tensor:
    """The three-sigma (PauTa) rule on one document's finite exponents, on the side of more attention."""
    finite = exponent.isfinite()
    if not bool(finite.any()):
        return torch.zeros_like(finite)
    values = exponent[finite]
    deviation = (values - values.mean()).square().mean().sqrt()
    return finite & (exponent < values.mean() - 3 * deviation)
