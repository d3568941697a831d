"""Sparse prefill: the new tokens of an extend batch attend to listed blocks of their requests' KV."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, check, use_triton
from ragserve_kernels.kv import check_head_dim, query_group
from ragserve_kernels.sparse_prefill.lists import (
    all_blocks,
    list_all,
    list_room,
    lists_at,
    lists_of,
    mask_of,
)
from ragserve_kernels.sparse_prefill.naive import sparse_prefill_naive
from ragserve_kernels.sparse_prefill.split import split_lists
from ragserve_kernels.sparse_prefill.types import BlockLists, PrefillBatch, SplitLists

__all__ = [
    "BlockLists",
    "PrefillBatch",
    "SplitLists",
    "all_blocks",
    "list_all",
    "list_room",
    "lists_at",
    "lists_of",
    "mask_of",
    "sparse_prefill",
    "sparse_prefill_naive",
    "split_lists",
]


def sparse_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PrefillBatch,
    lists: BlockLists,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one layer of an extend batch to the listed blocks, causally (LServe, sections 3.1 and 3.4).

    A query attends to the positions up to its own in the blocks that its query block and head list. A block
    is computed or skipped whole; with all blocks listed this is dense attention.

    Args:
        q: ``[batch.rows, query_heads, head_dim]``.
        k, v: ``[pool slots, kv_heads, head_dim]``, this layer of the pool; the new tokens' are in it.
        batch: the requests, and the sizes of blocks.
        lists: per query block and query head, or per query block and KV head. Entries are not checked.
        scale: of the scores; default 1 / sqrt(head_dim).
        out: like ``q``, contiguous; allocated by default.

    Returns:
        ``out``; zero for a query without a listed position.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check("q", q, FLOAT_DTYPES, (batch.rows, None, None), like=batch.page_table)
    check_head_dim(q.shape[2])
    check("k", k, q.dtype, (None, None, q.shape[2]), like=q)
    check("v", v, q.dtype, k.shape, like=q)
    query_group(q.shape[1], k.shape[1])
    check("lists.blocks", lists.blocks, torch.int32, (None,), like=q)
    check("lists.starts", lists.starts, torch.int32, (batch.query_blocks, None), like=q, dense=True)
    check("lists.counts", lists.counts, torch.int32, lists.starts.shape, like=q, dense=True)
    if lists.starts.shape[1] not in (q.shape[1], k.shape[1]):
        raise ValueError(
            f"lists.starts has {lists.starts.shape[1]} heads; expected {q.shape[1]} query heads or "
            f"{k.shape[1]} KV heads."
        )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check("out", out, q.dtype, q.shape, like=q, dense=True)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    if not scale > 0:
        raise ValueError(f"scale is {scale}; expected more than 0.")
    if batch.query_blocks == 0:
        return out
    if use_triton(q):
        from ragserve_kernels.sparse_prefill.triton import sparse_prefill_triton

        sparse_prefill_triton(q, k, v, batch, lists, out, scale=scale)
    else:
        sparse_prefill_naive(q, k, v, batch, lists, out, scale=scale, precision=torch.float32)
    return out
