"""The launches of ``block_summary``; nothing here waits for the device."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton

from ragserve_kernels.block_summary.plan import BlockPlan, BlockSummary
from ragserve_kernels.block_summary.triton import (
    DocumentRows,
    block_k_kernel,
    choose_kernel,
    exponent_kernel,
    fit_kernel,
    local_q_kernel,
    lse_kernel,
    received_kernel,
)
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.dot import dot_precision
from ragserve_kernels.kv import rows_of

FIT_BLOCKS = 16  # chosen tokens per tile of the fit: the least that a matrix product takes
# Tiles of the small kernels, the same for documents of any length: another size is another kernel to compile.
MOST_BLOCK_TOKENS = 128  # of a block
LOCAL_TOKENS = 32
EXPONENT_BLOCKS = 256


class SummaryTile(NamedTuple):
    rows: int  # query rows x query heads of one group
    keys: int
    warps: int
    stages: int


def choose_tile(head_dim: int, group: int, dtype: torch.dtype) -> SummaryTile:
    """The fastest on the H200 (README.md); float32 runs without tensor cores and needs small tiles."""
    least = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return SummaryTile(least, 32, 4, 1)
    return (
        SummaryTile(max(least, 64), 64, 4, 2) if head_dim == 256 else SummaryTile(max(least, 64), 128, 4, 3)
    )


def block_summary_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    lse: torch.Tensor | None = None,
) -> BlockSummary:
    device, tokens = q.device, plan.tokens
    query_heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    group = query_heads // kv_heads
    block_group = next_power_of_2(group)
    tile = choose_tile(head_dim, group, q.dtype)
    rows = max(1, tile.rows // block_group)
    stride, sampled = plan.query_stride, plan.max_length // plan.query_stride
    float32 = partial(torch.empty, dtype=torch.float32, device=device)

    shape = {
        "GROUP": group,
        "B_GROUP": block_group,
        "HEAD_DIM": head_dim,
        "STRIDE": stride,
        "PRECISION": dot_precision(q.dtype),
    }
    tuning = {"num_warps": tile.warps, "num_stages": tile.stages}
    scale_2 = scale * 1.4426950408889634
    q_rows, k_rows = rows_of(q), rows_of(k)
    logs = float32(query_heads, tokens) if lse is None else lse
    documents = DocumentRows(q_rows, k_rows, logs, plan.doc_start, scale_2)
    if lse is None and sampled:
        lse_kernel[(kv_heads, plan.documents, triton.cdiv(sampled, rows))](
            documents, tokens, B_ROWS=rows, B_KEYS=tile.keys, **shape, **tuning
        )
    by_head = float32(kv_heads, tokens)
    received_kernel[(kv_heads, plan.documents, triton.cdiv(plan.max_length, tile.keys))](
        documents, tokens, by_head, B_ROWS=rows, B_KEYS=tile.keys, **shape, **tuning
    )
    mean_k, min_k, max_k = (float32(plan.blocks, kv_heads, head_dim) for _ in range(3))
    block_k_kernel[(plan.blocks,)](
        k_rows,
        mean_k,
        min_k,
        max_k,
        plan.block_start,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        B_ROW=next_power_of_2(kv_heads * head_dim),
        UNROLL=8,
    )
    local_q = float32(plan.documents, query_heads, head_dim)
    local_q_kernel[(plan.documents, query_heads)](
        q_rows,
        local_q,
        plan.doc_start,
        plan.local_start,
        HEAD_DIM=head_dim,
        B_TOKENS=LOCAL_TOKENS,
    )
    received = float32(tokens)
    token = torch.empty(plan.blocks, dtype=torch.int32, device=device)
    attention, exponent = float32(plan.blocks), float32(plan.blocks)
    choose_kernel[(plan.blocks,)](
        by_head,
        received,
        token,
        attention,
        plan.doc_start,
        plan.block_start,
        plan.block_doc,
        tokens,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        MIN_QUERIES=plan.min_queries,
        STRIDE=stride,
        B_TOKENS=MOST_BLOCK_TOKENS,
    )
    fit_rows = max(1, 64 // block_group) if q.dtype != torch.float32 else max(1, 16 // block_group)
    query_tiles = max(1, triton.cdiv(sampled, fit_rows))
    parts = float32(query_tiles, 5, plan.blocks)
    fit_kernel[(query_tiles, triton.cdiv(plan.max_blocks, FIT_BLOCKS), plan.documents)](
        documents,
        tokens,
        token,
        attention,
        parts,
        plan.doc_block,
        plan.blocks,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        B_ROWS=fit_rows,
        B_BLOCKS=FIT_BLOCKS,
        **shape,
    )
    outlier = torch.empty(plan.blocks, dtype=torch.int8, device=device)
    exponent_kernel[(plan.documents,)](
        parts.sum(0),
        token,
        exponent,
        outlier,
        plan.doc_block,
        plan.blocks,
        B_BLOCKS=EXPONENT_BLOCKS,
    )
    return BlockSummary(mean_k, min_k, max_k, local_q, received, token, attention, exponent, outlier.bool())
