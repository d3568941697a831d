"""The attention of some queries, summed over key blocks."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, check, use_triton
from ragserve_kernels.kv import check_head_dim, query_group
from ragserve_kernels.sparse_prefill import PrefillBatch


def block_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    request: int,
    positions: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the log-sum-exp of scaled scores by key block, of some queries of a request.

    exp(result - logsumexp(result, -1)) is the share of a query's attention that each block gets.

    Args:
        q: ``[batch.rows, query_heads, head_dim]``.
        k: ``[pool slots, kv_heads, head_dim]``.
        positions: int32 ``[n]``, among the request's new ones.
        scale: of the scores; default 1 / sqrt(head_dim).

    Returns:
        float32 ``[query_heads, n, key blocks]``; -inf where a query sees nothing of a block.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check("q", q, FLOAT_DTYPES, (batch.rows, None, None), like=batch.page_table)
    check_head_dim(q.shape[2])
    check("k", k, q.dtype, (None, None, q.shape[2]), like=q)
    query_group(q.shape[1], k.shape[1])
    check("positions", positions, torch.int32, (None,), like=q)
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    length = batch.prefix[request] + batch.new[request]
    ahead = sum(batch.new[:request]) - batch.prefix[request]  # rows of q less positions
    if use_triton(q) and len(positions):
        from ragserve_kernels.prefill_lists.triton import block_lse_triton

        return block_lse_triton(q, k, batch, request, ahead, positions, length, scale=scale)
    return _block_lse_naive(q, k, batch, request, positions + ahead, positions, length, scale=scale)


def held_from(total: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the weight from which ``alpha`` of ``total`` is held; never, for 1: rounding would leave out
    what weighs little."""
    return torch.full_like(total, math.inf) if alpha == 1 else total * (alpha * (1 - 1e-6))


def keys_of(k: torch.Tensor, batch: PrefillBatch, request: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the keys of a request's tokens by position, ``[tokens, kv_heads, head_dim]``."""
    slots = batch.page_table[request, tokens // batch.page_size].long() * batch.page_size
    return k[slots + tokens % batch.page_size]


def _block_lse_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    request: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
    length: int,
    *,
    scale: float,
) -> torch.Tensor:
    tokens = torch.arange(length, device=q.device)
    keys = keys_of(k, batch, request, tokens).float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("nhd,khd->hnk", q[rows.long()].float(), keys) * scale
    scores = scores.masked_fill(tokens > positions[:, None], -math.inf)
    blocks = -(-length // batch.block_k)
    scores = torch.nn.functional.pad(scores, (0, blocks * batch.block_k - length), value=-math.inf)
    return scores.unflatten(-1, (blocks, batch.block_k)).logsumexp(-1)
