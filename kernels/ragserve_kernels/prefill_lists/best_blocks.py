"""Sink, local and best-scoring blocks (LServe, sections 3.1 and 3.4), scored by block means."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from ragserve_kernels.dispatch import FLOAT_DTYPES, check
from ragserve_kernels.kv import query_group
from ragserve_kernels.prefill_lists.block_scores import held_from, keys_of
from ragserve_kernels.sparse_prefill import PrefillBatch
from ragserve_kernels.sparse_prefill.lists import key_blocks

_TOKENS = 2**14  # keys that are averaged at once


def choose_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    *,
    alpha: float,
    share: float | None = None,
    sink: int = 1,
    local: int = 2,
    scale: float | None = None,
) -> torch.Tensor:
    """Choose key blocks that hold ``alpha`` of the weight that block means estimate, per head.

    A query block's weight of a key block is tokens * exp(scale * mean(q) . mean(k)). Chunks that begin and
    end between query blocks choose what the whole prompt does in one pass, but for rounding.

    Args:
        q: ``[batch.rows, query_heads, head_dim]``.
        k: ``[pool slots, kv_heads, head_dim]``, with the new tokens.
        alpha: the share, above 0 and up to 1.
        share: of the key blocks up to the query block's own, taken instead of as many as hold ``alpha``.
        sink: first key blocks that are always chosen.
        local: key blocks before the query block's own that are always chosen; so are its own.
        scale: of the scores; default 1 / sqrt(head_dim).

    Returns:
        bool ``[query blocks, query_heads, key blocks]``.

    Raises:
        ValueError, TypeError: sizes, shapes, dtypes or devices that do not fit.
    """
    check("q", q, FLOAT_DTYPES, (batch.rows, None, None), like=batch.page_table)
    check("k", k, q.dtype, (None, None, q.shape[2]), like=q)
    group = query_group(q.shape[1], k.shape[1])
    if not 0 < alpha <= 1 or min(sink, local) < 0:
        raise ValueError(f"alpha {alpha} must be above 0 and up to 1, sink {sink} and local {local} from 0.")
    check_share(share)
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    longest = max((a + b for a, b in zip(batch.prefix, batch.new, strict=True)), default=0)
    width = -(-longest // batch.block_k)
    weight = torch.zeros(batch.query_blocks, q.shape[1], width, device=q.device)
    reach, row = key_blocks(batch), 0
    for request, span in enumerate(batch.spans()):
        new = batch.new[request]
        if not new:
            continue
        length = batch.prefix[request] + new
        means = _key_means(k, batch, request, length)  # [key blocks, kv_heads, head_dim]
        queries = _means(q[row : row + new], batch.prefix[request], batch.block_q)
        scores = torch.einsum("thgd,khd->thgk", queries.unflatten(1, (-1, group)), means) * scale
        tokens = torch.full((len(means),), float(batch.block_k), device=q.device)
        tokens[-1] = length - (len(means) - 1) * batch.block_k
        scores = scores.flatten(1, 2) + tokens.log()
        beyond = torch.arange(len(means), device=q.device) >= reach[span.start : span.stop, None, None]
        parts = scores.masked_fill(beyond, -math.inf).softmax(-1)
        weight[span.start : span.stop, :, : len(means)] = parts
        row += new
    step = torch.arange(width, device=q.device)
    own = batch.places[:, 1, None] * batch.block_q // batch.block_k
    forced = (step < sink) | (step >= own - local)
    return greedy_blocks(weight, reach, forced & (step < reach[:, None]), alpha, share)


def greedy_blocks(
    weight: torch.Tensor,
    reach: torch.Tensor,
    forced: torch.Tensor,
    alpha: float,
    share: float | None = None,
) -> torch.Tensor:
    """Take the forced blocks, then those of the greatest weight, until ``alpha`` of it is held; all for 1.
    With a ``share`` until that part of the ``reach`` is taken, rounded up.

    Args:
        weight: float32 ``[query blocks, heads, key blocks]``.
        reach: int32 ``[query blocks]``: first key blocks that may be taken at all.
        forced: bool ``[query blocks, key blocks]``.

    Returns:
        bool, as ``weight``.
    """
    possible = torch.arange(weight.shape[-1], device=weight.device) < reach[:, None]
    worth = weight.masked_fill(forced[:, None], math.inf).masked_fill(~possible[:, None], -math.inf)
    order = worth.argsort(dim=-1, descending=True, stable=True)
    if share is None:
        taken = weight.gather(-1, order)
        before = taken.cumsum(-1) - taken
        within = before < held_from(weight.sum(-1, keepdim=True), alpha)
    else:
        place = torch.arange(weight.shape[-1], device=weight.device)
        within = (place < (reach[:, None, None] * share).ceil()).expand_as(order)
    chosen = torch.zeros_like(weight, dtype=torch.bool).scatter_(-1, order, within)
    return (chosen | forced[:, None]) & possible[:, None]


def check_share(share: float | None) -> None:
    """Raises ValueError for a share that is neither None nor above 0 and up to 1."""
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"share {share} must be above 0 and up to 1.")


def _key_means(k: torch.Tensor, batch: PrefillBatch, request: int, length: int) -> torch.Tensor:
    parts = []
    for start in range(0, length, _TOKENS):
        tokens = torch.arange(start, min(start + _TOKENS, length), device=k.device)
        parts.append(_means(keys_of(k, batch, request, tokens), start, batch.block_k))
    return torch.cat(parts)


def _means(rows: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Return the mean of each block's rows, float32 ``[blocks, ...]``; the first row is of position
    ``first``, and blocks of ``size`` positions are counted from position 0."""
    before = first % size
    after = -(before + len(rows)) % size
    if before or after:
        rows = pad(rows, (0, 0) * (rows.dim() - 1) + (before, after))
    sums = rows.unflatten(0, (-1, size)).sum(1, dtype=torch.float32)
    count = torch.full((len(sums),), float(size), device=rows.device)
    count[0] -= before
    count[-1] -= after
    return sums / count.view(-1, *[1] * (rows.dim() - 1))
