# mypy: disable-error-code="no-untyped-def"
"""Two kernels: the scores of all blocks, then the best of them by a search for the last score that fits.

A ranking sorts the scores instead. An item is a (layer, request, KV head). Shapes in comments: M query rows
of a group, D head size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.dot import dot, dot_precision
from ragserve_kernels.page_select.types import KeySummary
from ragserve_kernels.paged import PagedBatch, PageSelection, resident_programs, tile_rows

MOST_IN_REGISTERS = 16384
"""Blocks of an item that one program holds in registers."""


@triton.jit(do_not_specialize=["per_layer"])
def _score(
    p_q,  # [layers, batch, heads, D]
    p_low,  # [layers, rows, kv_heads, D]
    p_high,
    p_table,  # int32 [batch, max_blocks]
    p_lens,  # int32 [batch]
    p_active,  # int32 [batch]
    p_scores,  # float32 [items, max_blocks]
    p_counts,  # int32 [items]
    per_layer,
    kv_heads,
    max_blocks,
    sink,
    recent,
    stride_ql,
    stride_qb,
    stride_qh,
    stride_table,
    stride_layer,
    stride_row,
    stride_head,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO: tl.constexpr,
    RANK: tl.constexpr,
    SOME: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_item = tl.program_id(0)  # of layers x requests x KV heads
    i_l = (i_item // per_layer).to(tl.int64)
    i_b = (i_item % per_layer // kv_heads).to(tl.int64)
    i_h = (i_item % kv_heads).to(tl.int64)  # per_layer is a multiple of kv_heads
    p_q += i_l * stride_ql
    p_low += i_l * stride_layer
    p_high += i_l * stride_layer
    n_len = tl.load(p_lens + i_b)
    n_total = (n_len + BLOCK - 1) // BLOCK
    # An item's programs take turns: tables are as wide as the longest request may get, and mostly empty.
    i_turn = tl.program_id(1)
    n_turns = tl.num_programs(1)
    if RANK:  # the sort needs every score: -inf past the last block
        n_rows = max_blocks * PER_BLOCK
        if i_turn == 0:
            tl.store(p_counts + i_item, n_total)
    else:
        n_rows = n_total * PER_BLOCK
        if SOME:
            n_rows = tl.where(tl.load(p_active + i_b) > 0, n_rows, 0)
    o_head = tl.arange(0, BLOCK_M)
    o_dim = tl.arange(0, D)
    m_head = (o_head < GROUP)[:, None]
    p_query = p_q + i_b * stride_qb + i_h * GROUP * stride_qh + o_head[:, None] * stride_qh + o_dim[None, :]
    # [M, D]
    b_q = tl.load(p_query, mask=m_head, other=0.0)
    LOGICAL: tl.constexpr = BLOCK // PER_BLOCK
    if TWO:  # max(q kmax, q kmin) is q kmax where q > 0, else q kmin: two matrix products
        b_wide = b_q.to(tl.float32)
        b_q_high = tl.maximum(b_wide, 0.0).to(b_q.dtype)
        b_q_low = tl.minimum(b_wide, 0.0).to(b_q.dtype)
    for i_tile in tl.range(0, (tl.cdiv(n_rows, ROWS) - i_turn + n_turns - 1) // n_turns, num_stages=STAGES):
        i_start = (i_turn + i_tile * n_turns) * ROWS
        i_row = i_start + tl.arange(0, ROWS)
        i_block = i_row // PER_BLOCK
        m_row = i_row * LOGICAL < n_len
        # [ROWS]
        i_place = (
            tl.load(p_table + i_b * stride_table + i_block, mask=m_row, other=0).to(tl.int64) * PER_BLOCK
            + i_row % PER_BLOCK
        )
        o_row = i_place[:, None] * stride_row + i_h * stride_head + o_dim[None, :]
        # [ROWS, D]
        b_high = tl.load(p_high + o_row, mask=m_row[:, None], other=0.0)
        b_logits = tl.zeros([BLOCK_M, ROWS], tl.float32)
        if TWO:
            # [ROWS, D]
            b_low = tl.load(p_low + o_row, mask=m_row[:, None], other=0.0)
            b_logits = dot(b_q_high, tl.trans(b_high), b_logits, PRECISION)
            b_logits = dot(b_q_low, tl.trans(b_low), b_logits, PRECISION)
        else:
            b_logits = dot(b_q, tl.trans(b_high), b_logits, PRECISION)
        b_best = tl.max(tl.where(m_head, b_logits, float("-inf")), 0)
        b_best = tl.where(m_row, b_best, float("-inf"))
        b_score = tl.max(tl.reshape(b_best, (ROWS // PER_BLOCK, PER_BLOCK)), 1)
        o_block = i_start // PER_BLOCK + tl.arange(0, ROWS // PER_BLOCK)
        m_forced = (o_block < n_total) & ((o_block < sink) | (o_block >= n_total - recent))
        b_score = tl.where(m_forced, float("inf"), b_score)
        tl.store(
            p_scores + i_item.to(tl.int64) * max_blocks + o_block, b_score, mask=o_block * PER_BLOCK < n_rows
        )


@triton.jit
def _ordered(p_scores, o_block, m_block):
    """Return the scores as uint32 keys of the same order; NaN counts as the lowest."""
    # [CHUNK]
    b_score = tl.load(p_scores + o_block, mask=m_block, other=float("-inf"))
    b_score = tl.where(b_score != b_score, float("-inf"), b_score)
    b_bits = b_score.to(tl.int32, bitcast=True)
    return (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _choose_one(p_scores, p_index, n_total, n_take, CHUNK: tl.constexpr):
    """Find the last score that fits, two bits at a time."""
    o_block = tl.arange(0, CHUNK)
    m_block = o_block < n_total
    b_key = tl.where(m_block, _ordered(p_scores, o_block, m_block), 0)  # 0 is below every score
    b_last = tl.full([], 0, tl.uint32)
    for shift in tl.static_range(30, -1, -2):
        # how many keys reach each of the three next values of these two bits: one sum of three 21-bit fields
        b_one = (b_key >= (b_last | (1 << shift))).to(tl.int64)
        b_two = (b_key >= (b_last | (2 << shift))).to(tl.int64)
        b_three = (b_key >= (b_last | (3 << shift))).to(tl.int64)
        n_reach = tl.sum(b_one | (b_two << 21) | (b_three << 42), 0)
        n_digit = ((n_reach & 0x1FFFFF) >= n_take).to(tl.int32)
        n_digit += ((n_reach >> 21 & 0x1FFFFF) >= n_take).to(tl.int32)
        n_digit += ((n_reach >> 42) >= n_take).to(tl.int32)
        b_last = b_last | (n_digit.to(tl.uint32) << shift)
    m_above = m_block & (b_key > b_last)
    b_same = (m_block & (b_key == b_last)).to(tl.int32)
    n_left = n_take - tl.sum(m_above.to(tl.int32), 0)
    m_keep = m_above | ((b_same > 0) & (tl.cumsum(b_same, 0) <= n_left))
    b_place = tl.cumsum(m_keep.to(tl.int32), 0) - 1
    tl.store(p_index + b_place, o_block, mask=m_keep)


@triton.jit
def _choose_many(p_scores, p_index, n_total, n_take, CHUNK: tl.constexpr):
    """Find it in more blocks than registers hold: a byte at a time, by histograms."""
    if n_total <= n_take:
        for i_start in range(0, n_take, CHUNK):
            o_block = i_start + tl.arange(0, CHUNK)
            tl.store(p_index + o_block, o_block, mask=o_block < n_take)
    else:
        # radix search for the key of the last block that fits; n_left of the blocks with that very key fit
        o_digit = tl.arange(0, 256)
        b_prefix = tl.full([], 0, tl.uint32)
        n_left = n_take
        for shift in tl.static_range(24, -1, -8):
            b_histogram = tl.zeros([256], tl.int32)
            for i_start in range(0, n_total, CHUNK):
                o_block = i_start + tl.arange(0, CHUNK)
                m_block = o_block < n_total
                b_key = _ordered(p_scores, o_block, m_block)
                if shift < 24:
                    m_block = m_block & ((b_key >> (shift + 8)) == (b_prefix >> (shift + 8)))
                b_histogram += tl.histogram(((b_key >> shift) & 255).to(tl.int32), 256, mask=m_block)
            b_reach = tl.sum(b_histogram, 0) - tl.cumsum(b_histogram, 0) + b_histogram
            n_digit = tl.sum((b_reach >= n_left).to(tl.int32), 0) - 1
            n_left -= tl.sum(tl.where(o_digit == n_digit, b_reach - b_histogram, 0), 0)
            b_prefix = b_prefix | (n_digit.to(tl.uint32) << shift)
        n_chosen = 0
        n_equal = 0
        for i_start in range(0, n_total, CHUNK):
            o_block = i_start + tl.arange(0, CHUNK)
            m_block = o_block < n_total
            b_key = _ordered(p_scores, o_block, m_block)
            b_same = (m_block & (b_key == b_prefix)).to(tl.int32)
            m_keep = (m_block & (b_key > b_prefix)).to(tl.int32)
            m_keep += b_same * (n_equal + tl.cumsum(b_same, 0) <= n_left).to(tl.int32)
            tl.store(p_index + n_chosen + tl.cumsum(m_keep, 0) - 1, o_block, mask=m_keep > 0)
            n_chosen += tl.sum(m_keep, 0)
            n_equal += tl.sum(b_same, 0)


@triton.jit(do_not_specialize=["per_layer"])
def _choose(
    p_scores,  # float32 [items, max_blocks]
    p_lens,  # int32 [batch]
    p_index,  # int32 [layers, batch, kv_heads, capacity]
    p_counts,  # int32 [layers, batch, kv_heads]
    p_budgets,  # int32 [batch]
    p_active,  # int32 [batch]
    per_layer,
    kv_heads,
    max_blocks,
    capacity,
    stride_index,
    stride_counts,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,
    SOME: tl.constexpr,
    ONE: tl.constexpr,
):
    """Keep an item's best blocks: with ``ONE``, a single chunk, in registers, else chunk by chunk."""
    i_item = tl.program_id(0)
    i_l = (i_item // per_layer).to(tl.int64)
    i_b = i_item % per_layer // kv_heads
    if SOME:  # noqa: SIM102  (Triton has no short-circuit)
        if tl.load(p_active + i_b) <= 0:  # keeps its selection
            return
    n_total = (tl.load(p_lens + i_b) + BLOCK - 1) // BLOCK
    n_take = tl.minimum(n_total, capacity)
    if EACH:
        n_take = tl.minimum(n_take, tl.load(p_budgets + i_b))
    p_index += i_l * stride_index + (i_item % per_layer).to(tl.int64) * capacity
    p_counts += i_l * stride_counts + i_item % per_layer
    p_scores += i_item.to(tl.int64) * max_blocks
    tl.store(p_counts, n_take)
    if ONE:
        _choose_one(p_scores, p_index, n_total, n_take, CHUNK)
    else:
        _choose_many(p_scores, p_index, n_total, n_take, CHUNK)


def page_select(
    q: torch.Tensor,
    batch: PagedBatch,
    keys: KeySummary,
    *,
    budget: int | None,
    sink: int,
    recent: int,
    budgets: torch.Tensor | None,
    active: torch.Tensor | None,
    into: PageSelection | None,
) -> PageSelection:
    """Launch the kernels. ``q``, ``keys`` and ``into`` have layers in front; ``budget`` counts blocks."""
    layers, _, heads, head_dim = q.shape
    kv_heads = keys.high.shape[2]
    group = heads // kv_heads
    per_layer = batch.size * kv_heads
    n_items = layers * per_layer
    max_blocks = batch.page_table.shape[1]
    rows = max(16, 32768 // (head_dim * q.element_size()))
    rows = max(min(rows, next_power_of_2(max_blocks * keys.per_block)), keys.per_block, 16)
    tiles = triton.cdiv(max_blocks * keys.per_block, rows)
    splits = min(tiles, triton.cdiv(resident_programs(q, 4), n_items))
    shape = (layers, batch.size, kv_heads)
    scores = torch.empty(*shape, max_blocks, dtype=torch.float32, device=q.device)
    counts = into.counts if into is not None else torch.empty(shape, dtype=torch.int32, device=q.device)
    absent = batch.seq_lens  # stands for an absent pointer
    rest = absent if active is None else active
    _score[(n_items, splits)](
        q,
        keys.high if keys.low is None else keys.low,
        keys.high,
        batch.page_table,
        batch.seq_lens,
        rest,
        scores,
        counts,
        per_layer,
        kv_heads,
        max_blocks,
        sink,
        recent,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        batch.page_table.stride(0),
        keys.high.stride(0),
        keys.high.stride(1),
        keys.high.stride(2),
        GROUP=group,
        BLOCK_M=tile_rows(group),
        D=head_dim,
        ROWS=rows,
        PER_BLOCK=keys.per_block,
        BLOCK=batch.block_size,
        TWO=keys.low is not None,
        RANK=budget is None,
        SOME=active is not None,
        PRECISION=dot_precision(q.dtype),
        STAGES=3 if q.element_size() < 4 else 1,
        num_warps=4,
    )
    if budget is None:
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        return PageSelection(order.to(torch.int32), counts)
    index = (
        into.blocks if into is not None else torch.empty(*shape, budget, dtype=torch.int32, device=q.device)
    )
    chunk = max(64, next_power_of_2(max_blocks))
    one = chunk <= MOST_IN_REGISTERS
    _choose[(n_items,)](
        scores,
        batch.seq_lens,
        index,
        counts,
        absent if budgets is None else budgets,
        rest,
        per_layer,
        kv_heads,
        max_blocks,
        budget,
        index.stride(0),
        counts.stride(0),
        BLOCK=batch.block_size,
        CHUNK=chunk if one else min(chunk, 4096),
        EACH=budgets is not None,
        SOME=active is not None,
        ONE=one,
        num_warps=max(4, min(16, chunk // 256)) if one else 8,
    )
    return PageSelection(index, counts)
