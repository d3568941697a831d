"""The truth of ``block_summary`` in plain torch: the whole attention matrix of each document."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.block_summary.plan import BlockPlan, BlockSummary

_AT_ONCE = 2**25  # scores of one head group
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
    doc_start, doc_block = plan.doc_start.tolist(), plan.doc_block.tolist()
    for d, local in enumerate(plan.local_start.tolist()):
        start, end = doc_start[d], doc_start[d + 1]
        if start == end:
            continue
        own, size = slice(doc_block[d], doc_block[d + 1]), plan.block_tokens[d]
        count = own.stop - own.start
        keys = k[start:end].to(precision)
        filled = _by_block(keys, count, size, 0.0).sum(1)
        sizes = torch.full((count, 1, 1), float(size), dtype=precision, device=device)
        sizes[-1] = end - start - (count - 1) * size
        mean_k[own] = (filled / sizes).to(mean_k.dtype)
        min_k[own] = _by_block(keys, count, size, math.inf).amin(1).to(min_k.dtype)
        max_k[own] = _by_block(keys, count, size, -math.inf).amax(1).to(max_k.dtype)
        local_q[d] = q[local:end].to(precision).mean(0)
        # [sampled, n], strictly later queries
        weights = sampled_weights(q[start:end], k[start:end], plan.query_stride, scale, precision)
        queries = torch.arange(len(weights), device=device) * plan.query_stride + plan.query_stride - 1
        later = (queries[:, None] > torch.arange(end - start, device=device)[None, :]).sum(0)
        received[start:end] = weights.sum(0)
        mean = torch.where(later >= plan.min_queries, weights.sum(0) / later.clamp(min=1), -math.inf)
        first = torch.arange(count, device=device) * size
        if token is None:
            best = first + _by_block(mean, count, size, -math.inf).argmax(1)
        else:
            best = token[own].long() - start
        fits = (best >= 0) & (mean[best.clamp(min=0)] > -math.inf)
        fitted, best = own.start + fits.nonzero()[:, 0], best[fits]
        chosen[fitted], attention[fitted] = (start + best).int(), mean[best].to(attention.dtype)
        behind = (queries[:, None] > best[None, :]).to(precision)  # [sampled, fitted]
        distance = (queries[:, None] - best[None, :]).clamp(min=1).to(precision).log()
        height = weights[:, best].clamp(min=TINY).log()
        distance = (distance - (distance * behind).sum(0) / behind.sum(0)) * behind
        height = (height - (height * behind).sum(0) / behind.sum(0)) * behind
        slope = (distance * height).sum(0) / (distance * distance).sum(0)
        exponent[fitted] = -slope.to(exponent.dtype)
        outlier[own] = outliers(exponent[own].to(precision))
    return BlockSummary(mean_k, min_k, max_k, local_q, received, chosen, attention, exponent, outlier)


def _by_block(values: torch.Tensor, blocks: int, size: int, fill: float) -> torch.Tensor:
    """Cut ``values`` [n, ...] into [blocks, size, ...], the last block filled up."""
    padded = values.new_full((blocks * size, *values.shape[1:]), fill)
    padded[: len(values)] = values
    return padded.unflatten(0, (blocks, size))


def sampled_weights(
    q: torch.Tensor, k: torch.Tensor, stride: int, scale: float, precision: torch.dtype
) -> torch.Tensor:
    """``[sampled queries, n]``: causal attention averaged over query heads; zero at and after the query's own
    position.
    """
    n, group = len(k), q.shape[1] // k.shape[1]
    rows = torch.arange(n // stride, device=q.device) * stride + stride - 1
    columns = torch.arange(n, device=q.device)
    later = columns[None, :] > rows[:, None]
    at_once = max(
        1, _AT_ONCE // max(1, group * len(rows) * n)
    )  # KV heads: bounds the memory of long documents
    total = torch.zeros(len(rows), n, dtype=precision, device=q.device)
    for first in range(0, k.shape[1], at_once):
        heads = slice(first, first + at_once)
        queries = q[rows, first * group : (first + at_once) * group].to(precision)
        keys = k[:, heads].to(precision).repeat_interleave(group, 1)
        scores = torch.einsum("rhd,khd->hrk", queries, keys).mul_(scale).masked_fill_(later, -math.inf)
        total += torch.softmax(scores, -1).sum(0)
    return (total / q.shape[1]).masked_fill_(columns[None, :] >= rows[:, None], 0.0)


def outliers(exponent: torch.Tensor) -> torch.Tensor:
    """The three-sigma (PauTa) rule on one document's finite exponents, on the side of more attention."""
    finite = exponent.isfinite()
    if not bool(finite.any()):
        return torch.zeros_like(finite)
    values = exponent[finite]
    deviation = (values - values.mean()).square().mean().sqrt()
    return finite & (exponent < values.mean() - 3 * deviation)
