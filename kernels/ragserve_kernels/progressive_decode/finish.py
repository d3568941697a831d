# mypy: disable-error-code="no-untyped-def"
"""The launch behind the rounds: it merges what their programs have, counts the pages that they read from the
host, and enters the shared blocks that they filled. Import with Triton only."""

from __future__ import annotations

import triton
import triton.language as tl

from ragserve_kernels.progressive_decode.placed_tiles import FILLS, FLAGS

COUNTED: tl.constexpr = tl.constexpr(128)  # ranked blocks that are counted at once


@triton.jit(do_not_specialize=["stride_places", "stride_places_head", "i_layer"])
def finish(
    p_out,
    p_weight,
    p_used,
    p_stopped,
    p_acc,
    p_states,  # float32 [rounds, items, 3, SPLITS, M]
    p_lens,
    p_index,
    p_counts,
    p_table,  # those of `addresses` with PLACED, else not read
    stride_table,
    p_from_host,  # int32 [items], likewise
    p_places,  # see `_resolve`; read with CELLS, as what follows
    stride_places,
    stride_places_head,
    p_shared,
    i_layer,
    n_layers,
    kv_heads,
    capacity,
    n_rounds,
    stride_round,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACED: tl.constexpr,
    CELLS: tl.constexpr,
):
    i_item = tl.program_id(0)
    i_g = tl.program_id(1)
    n_ranked = tl.minimum(tl.maximum(tl.load(p_counts + i_item), 0), capacity)
    n_ranked = tl.where(tl.load(p_lens + i_item // kv_heads) > 0, n_ranked, 0)
    i_stop = tl.load(p_stopped + i_item)
    o_row = i_item.to(tl.int64) * GROUP + i_g
    if i_stop < 0:  # ran to the end: the rounds cover the whole capacity
        i_stop = n_rounds
        tl.store(p_weight + o_row, 1.0)
        if i_g == 0:
            tl.store(p_used + i_item, n_ranked)
        n_used = n_ranked
    else:
        n_used = tl.load(p_used + i_item)
    if PLACED:
        p_row = p_table + i_item.to(tl.int64) * 2 * stride_table
        n_host = tl.zeros([COUNTED], tl.int32)
        for i_first in tl.range(0, n_used, COUNTED):
            o_rank = i_first + tl.arange(0, COUNTED)
            m_used = o_rank < n_used
            i_block = tl.load(p_index + i_item.to(tl.int64) * capacity + o_rank, mask=m_used, other=0)
            a_k = tl.load(p_row + 2 * i_block, mask=m_used, other=0)
            n_host += ((a_k & FLAGS) != 0).to(tl.int32)
            if (
                CELLS
            ):  # what the rounds have written to shared blocks can be looked up there from the next step on
                m_fill = m_used & ((a_k & FILLS) != 0) & (i_g == 0)
                i_b, i_h = (i_item // kv_heads).to(tl.int64), (i_item % kv_heads).to(tl.int64)
                p_place = p_places + i_b * stride_places + i_h * stride_places_head + i_block
                i_page = -1 - tl.load(p_place, mask=m_fill, other=-1).to(tl.int64)
                p_entry = p_shared + (i_page * n_layers + i_layer) * kv_heads + i_h
                i_shared = tl.load(p_entry, mask=m_fill, other=-1)
                tl.store(p_entry, tl.where(i_shared < -1, -2 - i_shared, i_shared), mask=m_fill)
        tl.store(p_from_host + i_item, tl.sum(n_host, 0), mask=i_g == 0)
    p_state = p_states + (i_stop - 1).to(tl.int64) * stride_round
    o_split = tl.arange(0, SPLITS)
    o_state = (i_item * 3 * SPLITS + o_split).to(tl.int64) * BLOCK_M + i_g
    # [SPLITS] each
    b_max = tl.load(p_state + o_state)
    b_sum = tl.load(p_state + SPLITS * BLOCK_M + o_state)
    m_some = b_sum > 0.0
    b_top = tl.max(tl.where(m_some, b_max, float("-inf")), 0)
    b_factor = tl.where(m_some, tl.math.exp2(b_max - tl.where(b_top == float("-inf"), 0.0, b_top)), 0.0)
    b_total = tl.sum(tl.where(m_some, b_sum, 0.0) * b_factor, 0)
    o_dim = tl.arange(0, D)
    p_acc_row = p_acc + ((i_item * SPLITS + o_split).to(tl.int64) * GROUP + i_g)[:, None] * D + o_dim[None, :]
    # [SPLITS, D]
    b_acc = tl.sum(tl.load(p_acc_row, mask=m_some[:, None], other=0.0) * b_factor[:, None], 0)
    tl.store(
        p_out + o_row * D + o_dim,
        tl.where(b_total > 0.0, b_acc / tl.where(b_total > 0.0, b_total, 1.0), 0.0).to(
            p_out.dtype.element_ty
        ),
    )
