# mypy: disable-error-code="no-untyped-def"
"""``sparse_prefill`` in Triton: flash attention that iterates over the listed key blocks only."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import at_head
from ragserve_kernels.dot import dot_precision
from ragserve_kernels.flash_tile import fold_tile
from ragserve_kernels.kv import rows_of
from ragserve_kernels.sparse_prefill.types import BlockLists, PrefillBatch


class PrefillTile(NamedTuple):
    """What a program computes at once: ``rows`` and ``keys`` divide the query and key blocks, or are they."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def attend_blocks(
    state,  # of `fold_tile`
    b_q,  # [M, D]
    k,  # HeadRows of one KV head
    v,
    p_index,
    p_pages,
    i_position,  # int32 [M]
    n_len,
    i_begin,
    i_end,
    scale_2,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold entries ``i_begin`` to ``i_end`` of a list into the running softmax; without ``MASKED`` every row
    attends to all of their positions.
    """
    o_key = tl.arange(0, B_KEYS)
    PARTS: tl.constexpr = BLOCK_K // B_KEYS
    for i_part in tl.range(i_begin * PARTS, i_end * PARTS):
        i_first = tl.load(p_index + i_part // PARTS) * BLOCK_K + i_part % PARTS * B_KEYS
        i_key = i_first + o_key
        if PAGE % B_KEYS == 0:  # a tile lies in one page: one scalar look-up
            i_page = tl.load(p_pages + i_first // PAGE, mask=i_first < n_len, other=0).to(tl.int64)
            i_slot = i_page * PAGE + i_first % PAGE + o_key
        else:
            # [N]
            i_page = tl.load(p_pages + i_key // PAGE, mask=i_key < n_len, other=0).to(tl.int64)
            i_slot = i_page * PAGE + i_key % PAGE
        m_key = i_key < n_len
        state = fold_tile(
            state, b_q, k, v, i_slot, i_key, m_key, i_position, scale_2, HEAD_DIM, MASKED, PRECISION
        )
    return state


@triton.jit(do_not_specialize=["n_blocks", "n_stride_pages"])
def sparse_prefill_kernel(
    q,  # HeadRows of [R, Hq, D]
    k,  # HeadRows of [slots, Hkv, D]
    v,
    p_out,  # [R, Hq, D], contiguous
    p_bounds,  # int32 [requests, 3]
    p_places,  # int32 [T, 2], T query blocks
    p_pages,  # int32 [requests, pages]
    p_index,
    p_start,  # int32 [T, LIST_HEADS], contiguous
    p_count,
    n_blocks,  # T
    n_stride_pages,
    scale_2,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LIST_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_KEYS: tl.constexpr,
    MOST_MASKED: tl.constexpr,  # entries of a list that any of its queries sees a part of, at most
    PRECISION: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK_Q // B_ROWS
    i_head = tl.program_id(0)  # heads of a group run side by side: they share KV in L2
    # the last blocks list the most: start them first
    i_part = n_blocks * PARTS - 1 - tl.program_id(1)
    i_place = i_part // PARTS
    i_request = tl.load(p_places + i_place * 2).to(tl.int64)
    i_query_first = tl.load(p_places + i_place * 2 + 1) * BLOCK_Q
    n_prefix = tl.load(p_bounds + i_request * 3)
    n_len = tl.load(p_bounds + i_request * 3 + 1)
    i_row_first = tl.load(p_bounds + i_request * 3 + 2).to(tl.int64)
    i_first = i_query_first + i_part % PARTS * B_ROWS
    if (i_first >= n_len) | (i_first + B_ROWS <= n_prefix):  # no row of the batch
        return
    # [M]
    i_position = i_first + tl.arange(0, B_ROWS)
    i_row = i_row_first + i_position - n_prefix
    m_row = (i_position >= n_prefix) & (i_position < n_len)

    o_list = i_place * LIST_HEADS + i_head // (QUERY_HEADS // LIST_HEADS)
    p_index += tl.load(p_start + o_list).to(tl.int64)
    n_listed = tl.load(p_count + o_list)
    p_pages += i_request * n_stride_pages
    # ascending: those that some query sees only a part of are the last ones
    o_last = n_listed - 1 - tl.arange(0, MOST_MASKED)
    i_last = tl.load(p_index + o_last, mask=o_last >= 0, other=-1)
    n_masked = tl.sum((i_last >= i_query_first // BLOCK_K).to(tl.int32), 0)

    o_dim = tl.arange(0, HEAD_DIM)
    i_kv_head = (i_head // GROUP).to(tl.int64)
    k = at_head(k, i_kv_head)
    v = at_head(v, i_kv_head)
    # [M, D]
    b_q = tl.load(
        q.p + i_row[:, None] * q.stride + i_head * q.stride_head + o_dim[None, :],
        mask=m_row[:, None],
        other=0.0,
    )
    b_acc = tl.zeros([B_ROWS, HEAD_DIM], tl.float32)
    b_max = tl.full([B_ROWS], -float("inf"), tl.float32)
    b_sum = tl.zeros([B_ROWS], tl.float32)
    state = (b_acc, b_max, b_sum)
    # fmt: off
    state = attend_blocks(
        state, b_q, k, v, p_index, p_pages, i_position, n_len, 0, n_listed - n_masked, scale_2,
        HEAD_DIM, PAGE, BLOCK_K, B_KEYS, False, PRECISION,
    )
    state = attend_blocks(
        state, b_q, k, v, p_index, p_pages, i_position, n_len, n_listed - n_masked, n_listed, scale_2,
        HEAD_DIM, PAGE, BLOCK_K, B_KEYS, True, PRECISION,
    )
    # fmt: on
    b_acc, b_max, b_sum = state
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    tl.store(
        p_out + (i_row * QUERY_HEADS + i_head)[:, None] * HEAD_DIM + o_dim[None, :],
        b_out.to(p_out.dtype.element_ty),
        mask=m_row[:, None],
    )


def choose_tile(head_dim: int, dtype: torch.dtype, block_q: int, block_k: int) -> PrefillTile:
    """Return the tile of a launch. float32 runs without tensor cores and needs small tiles."""
    if dtype == torch.float32:
        return PrefillTile(min(16, block_q), min(32, block_k), 4, 1)
    if head_dim == 256:
        return PrefillTile(min(64, block_q), min(32, block_k), 4, 2)
    rows = block_q if block_k > 64 else min(64, block_q)  # as measured on an H200
    return PrefillTile(rows, min(64, block_k), 4, 3)


def sparse_prefill_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PrefillBatch,
    lists: BlockLists,
    out: torch.Tensor,
    *,
    scale: float,
    tile: PrefillTile | None = None,
) -> None:
    """Launch the kernel; ``tile``: to measure others than the one chosen here."""
    _, query_heads, head_dim = q.shape
    block_q, block_k = batch.block_q, batch.block_k
    tile = choose_tile(head_dim, q.dtype, block_q, block_k) if tile is None else tile
    sparse_prefill_kernel[(query_heads, batch.query_blocks * (block_q // tile.rows))](
        rows_of(q),
        rows_of(k),
        rows_of(v),
        out,
        batch.bounds,
        batch.places,
        batch.page_table,
        lists.blocks,
        lists.starts,
        lists.counts,
        batch.query_blocks,
        batch.page_table.stride(0),
        scale * 1.4426950408889634,
        QUERY_HEADS=query_heads,
        GROUP=query_heads // k.shape[1],
        LIST_HEADS=lists.starts.shape[1],
        HEAD_DIM=head_dim,
        PAGE=batch.page_size,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        B_ROWS=tile.rows,
        B_KEYS=tile.keys,
        MOST_MASKED=batch.most_masked,
        PRECISION=dot_precision(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
