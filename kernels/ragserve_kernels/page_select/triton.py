# mypy: disable-error-code="no-untyped-def"
"""Two kernels: scores of all blocks, then the best of them by a search for the last score that fits. Ranking
sorts the scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.dot import dot, dot_precision
from ragserve_kernels.paged import resident_programs, tile_rows

MOST_IN_REGISTERS = 16384
"""Blocks of an item that one program holds in registers."""


@triton.jit
def _score(
    q,
    low,
    high,
    table,
    lens,
    active,
    scores,
    counts,
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
    SUM: tl.constexpr,
    RANK: tl.constexpr,
    SOME: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    item = tl.program_id(0)  # of layers x requests x KV heads
    i_l = (item // per_layer).to(tl.int64)
    i_b = (item % per_layer // kv_heads).to(tl.int64)
    i_h = (item % kv_heads).to(tl.int64)  # per_layer is a multiple of kv_heads
    q += i_l * stride_ql
    low += i_l * stride_layer
    high += i_l * stride_layer
    seq_len = tl.load(lens + i_b)
    total = (seq_len + BLOCK - 1) // BLOCK
    # an item's programs take turns: tables are as wide as the longest request may get, and most of it is
    # empty
    turn = tl.program_id(1)
    turns = tl.num_programs(1)
    if RANK:  # the sort needs every score: -inf past the last block
        end = max_blocks * PER_BLOCK
        if turn == 0:
            tl.store(counts + item, total)
    else:
        end = total * PER_BLOCK
        if SOME:
            end = tl.where(tl.load(active + i_b) > 0, end, 0)
    heads = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, D)
    is_head = (heads < GROUP)[:, None]
    address = q + i_b * stride_qb + i_h * GROUP * stride_qh + heads[:, None] * stride_qh + cols[None, :]
    b_q = tl.load(address, mask=is_head, other=0.0)
    logical: tl.constexpr = BLOCK // PER_BLOCK
    if TWO:  # max(q kmax, q kmin) is q kmax where q > 0 and q kmin elsewhere: two matrix products
        wide = b_q.to(tl.float32)
        q_high = tl.maximum(wide, 0.0).to(b_q.dtype)
        q_low = tl.minimum(wide, 0.0).to(b_q.dtype)
    for tile in tl.range(0, (tl.cdiv(end, ROWS) - turn + turns - 1) // turns, num_stages=STAGES):
        start = (turn + tile * turns) * ROWS
        row = start + tl.arange(0, ROWS)
        block = row // PER_BLOCK
        ok = row * logical < seq_len
        place = (
            tl.load(table + i_b * stride_table + block, mask=ok, other=0).to(tl.int64) * PER_BLOCK
            + row % PER_BLOCK
        )
        offset = place[:, None] * stride_row + i_h * stride_head + cols[None, :]
        b_high = tl.load(high + offset, mask=ok[:, None], other=0.0)  # [ROWS, D]
        logits = tl.zeros([BLOCK_M, ROWS], tl.float32)
        if TWO:
            b_low = tl.load(low + offset, mask=ok[:, None], other=0.0)
            logits = dot(q_high, tl.trans(b_high), logits, PRECISION)
            logits = dot(q_low, tl.trans(b_low), logits, PRECISION)
        else:
            logits = dot(b_q, tl.trans(b_high), logits, PRECISION)
        best = (
            tl.sum(tl.where(is_head, logits, 0.0), 0)
            if SUM
            else tl.max(tl.where(is_head, logits, float("-inf")), 0)
        )
        best = tl.where(ok, best, float("-inf"))
        b_score = tl.max(tl.reshape(best, (ROWS // PER_BLOCK, PER_BLOCK)), 1)
        blocks = start // PER_BLOCK + tl.arange(0, ROWS // PER_BLOCK)
        forced = (blocks < total) & ((blocks < sink) | (blocks >= total - recent))
        b_score = tl.where(forced, float("inf"), b_score)
        tl.store(scores + item.to(tl.int64) * max_blocks + blocks, b_score, mask=blocks * PER_BLOCK < end)


@triton.jit
def _ordered(scores, blocks, ok):
    """Scores as uint32 that order like them; NaN counts as the lowest."""
    b_score = tl.load(scores + blocks, mask=ok, other=float("-inf"))
    b_score = tl.where(b_score != b_score, float("-inf"), b_score)
    bits = b_score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _choose_one(
    scores,
    lens,
    index,
    counts,
    budgets,
    active,
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
):
    """All of an item's blocks in registers: two bits of the last score that fits at a time, by counting."""
    item = tl.program_id(0)
    i_l = (item // per_layer).to(tl.int64)
    i_b = item % per_layer // kv_heads
    if SOME:  # noqa: SIM102  (Triton has no short-circuit)
        if tl.load(active + i_b) <= 0:  # keeps its selection
            return
    total = (tl.load(lens + i_b) + BLOCK - 1) // BLOCK
    take = tl.minimum(total, capacity)
    if EACH:
        take = tl.minimum(take, tl.load(budgets + i_b))
    index += i_l * stride_index + (item % per_layer).to(tl.int64) * capacity
    counts += i_l * stride_counts + item % per_layer
    blocks = tl.arange(0, CHUNK)
    ok = blocks < total
    key = _ordered(scores + item.to(tl.int64) * max_blocks, blocks, ok)  # 0 is below every score
    key = tl.where(ok, key, 0)
    last = tl.full([], 0, tl.uint32)
    for shift in tl.static_range(30, -1, -2):
        # how many keys reach each of the three next values of these two bits, counted in one sum of three
        # 21-bit fields
        one = (key >= (last | (1 << shift))).to(tl.int64)
        two = (key >= (last | (2 << shift))).to(tl.int64)
        three = (key >= (last | (3 << shift))).to(tl.int64)
        reach = tl.sum(one | (two << 21) | (three << 42), 0)
        digit = ((reach & 0x1FFFFF) >= take).to(tl.int32)
        digit += ((reach >> 21 & 0x1FFFFF) >= take).to(tl.int32)
        digit += ((reach >> 42) >= take).to(tl.int32)
        last = last | (digit.to(tl.uint32) << shift)
    above = ok & (key > last)
    same = (ok & (key == last)).to(tl.int32)
    left = take - tl.sum(above.to(tl.int32), 0)
    keep = above | ((same > 0) & (tl.cumsum(same, 0) <= left))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(index + place, blocks, mask=keep)
    tl.store(counts, take)


@triton.jit
def _choose_many(
    scores,
    lens,
    index,
    counts,
    budgets,
    active,
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
):
    """The same in chunks, for more blocks than registers hold: a byte at a time, by histograms."""
    item = tl.program_id(0)
    i_l = (item // per_layer).to(tl.int64)
    i_b = item % per_layer // kv_heads
    if SOME:  # noqa: SIM102  (Triton has no short-circuit)
        if tl.load(active + i_b) <= 0:  # keeps its selection
            return
    total = (tl.load(lens + i_b) + BLOCK - 1) // BLOCK
    take = tl.minimum(total, capacity)
    if EACH:
        take = tl.minimum(take, tl.load(budgets + i_b))
    index += i_l * stride_index + (item % per_layer).to(tl.int64) * capacity
    counts += i_l * stride_counts + item % per_layer
    scores += item.to(tl.int64) * max_blocks
    tl.store(counts, take)
    if total <= take:
        for start in range(0, take, CHUNK):
            blocks = start + tl.arange(0, CHUNK)
            tl.store(index + blocks, blocks, mask=blocks < take)
    else:
        # radix search, a byte at a time, for the key of the last block that fits; `left` of the blocks with
        # that very key fit
        digits = tl.arange(0, 256)
        prefix = tl.full([], 0, tl.uint32)
        left = take
        for shift in tl.static_range(24, -1, -8):
            histogram = tl.zeros([256], tl.int32)
            for start in range(0, total, CHUNK):
                blocks = start + tl.arange(0, CHUNK)
                ok = blocks < total
                key = _ordered(scores, blocks, ok)
                if shift < 24:
                    ok = ok & ((key >> (shift + 8)) == (prefix >> (shift + 8)))
                histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=ok)
            at_least = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
            digit = tl.sum((at_least >= left).to(tl.int32), 0) - 1
            left -= tl.sum(tl.where(digits == digit, at_least - histogram, 0), 0)
            prefix = prefix | (digit.to(tl.uint32) << shift)
        chosen = 0
        equal = 0
        for start in range(0, total, CHUNK):
            blocks = start + tl.arange(0, CHUNK)
            ok = blocks < total
            key = _ordered(scores, blocks, ok)
            same = (ok & (key == prefix)).to(tl.int32)
            keep = (ok & (key > prefix)).to(tl.int32)
            keep += same * (equal + tl.cumsum(same, 0) <= left).to(tl.int32)
            tl.store(index + chosen + tl.cumsum(keep, 0) - 1, blocks, mask=keep > 0)
            chosen += tl.sum(keep, 0)
            equal += tl.sum(same, 0)


def page_select(
    q: torch.Tensor,
    summaries: tuple[torch.Tensor, ...],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    per_block: int,
    budget: int | None,
    sink: int,
    recent: int,
    sum_group: bool,
    budgets: torch.Tensor | None,
    active: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor] | None,
    options: tuple[int, int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [layers, batch, heads, head_dim] and summaries [layers, ...]. ``options``: ``(rows per tile,
    warps, stages)``, to tune them.
    """
    layers, batch, heads, head_dim = q.shape
    kv_heads = summaries[0].shape[2]
    group = heads // kv_heads
    per_layer = batch * kv_heads
    n_items = layers * per_layer
    max_blocks = block_table.shape[1]
    rows, warps, stages = options or (
        max(16, 32768 // (head_dim * q.element_size())),
        4,
        3 if q.element_size() < 4 else 1,
    )
    rows = max(min(rows, next_power_of_2(max_blocks * per_block)), per_block, 16)
    tiles = triton.cdiv(max_blocks * per_block, rows)
    splits = min(tiles, triton.cdiv(resident_programs(q, 4), n_items))
    scores = torch.empty(layers, batch, kv_heads, max_blocks, dtype=torch.float32, device=q.device)
    counts = (
        torch.empty(layers, batch, kv_heads, dtype=torch.int32, device=q.device) if into is None else into[1]
    )
    low, high = summaries[0], summaries[-1]
    none = seq_lens  # stands for an absent pointer
    some = none if active is None else active
    _score[(n_items, splits)](
        q,
        low,
        high,
        block_table,
        seq_lens,
        some,
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
        block_table.stride(0),
        high.stride(0),
        high.stride(1),
        high.stride(2),
        GROUP=group,
        BLOCK_M=tile_rows(group),
        D=head_dim,
        ROWS=rows,
        PER_BLOCK=per_block,
        BLOCK=block_size,
        TWO=len(summaries) == 2,
        SUM=sum_group,
        RANK=budget is None,
        SOME=active is not None,
        PRECISION=dot_precision(q.dtype),
        STAGES=stages,
        num_warps=warps,
    )
    if budget is None:
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices.to(torch.int32), counts
    index = (
        torch.empty(layers, batch, kv_heads, budget, dtype=torch.int32, device=q.device)
        if into is None
        else into[0]
    )
    chunk = max(64, next_power_of_2(max_blocks))
    if chunk <= MOST_IN_REGISTERS:
        choose, warps = _choose_one, max(4, min(16, chunk // 256))
    else:
        choose, warps, chunk = _choose_many, 8, min(chunk, 4096)
    choose[(n_items,)](
        scores,
        seq_lens,
        index,
        counts,
        none if budgets is None else budgets,
        some,
        per_layer,
        kv_heads,
        max_blocks,
        budget,
        index.stride(0),
        counts.stride(0),
        BLOCK=block_size,
        CHUNK=chunk,
        EACH=budgets is not None,
        SOME=active is not None,
        num_warps=warps,
    )
    return index, counts
