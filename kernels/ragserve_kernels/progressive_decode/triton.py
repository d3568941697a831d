# mypy: disable-error-code="no-untyped-def"
"""PSA's rounds as a fixed chain of launches: in each, a (request, KV head) that has passed the threshold
exits at once.

Every item's round is split over a fixed number of programs. A program keeps its part of the output in place
over the rounds; the log sums that the stopping rule needs go to a buffer per round, because the programs of
the next round all read them while they already write their own."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import attend_tile, load_query, tile_slots
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.paged import KV, code_precision, kv_arguments, resident_programs, tile_rows, tile_tokens
from ragserve_kernels.progressive_decode.naive import MAX_TILE

LN2 = math.log(2.0)


@triton.jit
def _lse(values, AXIS: tl.constexpr):
    """log2 of the sum of exp2 along ``AXIS``; -inf of nothing."""
    top = tl.max(values, AXIS)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.math.exp2(values - tl.expand_dims(safe, AXIS)), AXIS)
    return tl.where(total > 0.0, safe + tl.math.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))


@triton.jit
def _estimate(state, item, left, ranked, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, MEAN: tl.constexpr):
    """P per head [BLOCK_M] from a round's state, ``[items, 3, splits, BLOCK_M]``: running maximum, sum, and
    the bound's part.

    That is the lowest block so far or, with ``MEAN``, the log sum of the round's ``ranked`` blocks.
    """
    at = tl.arange(0, SPLITS)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    base = state + item.to(tl.int64) * (3 * SPLITS * BLOCK_M)
    b_max = tl.load(base + at)
    b_sum = tl.load(base + SPLITS * BLOCK_M + at)
    parts = tl.load(base + 2 * SPLITS * BLOCK_M + at)
    if MEAN:
        each = tl.where(
            ranked > 0, _lse(parts, 0) - tl.math.log2(tl.maximum(ranked, 1).to(tl.float32)), float("inf")
        )
    else:
        each = tl.min(parts, 0)
    some = b_sum > 0.0
    seen = _lse(tl.where(some, b_max + tl.math.log2(tl.where(some, b_sum, 1.0)), float("-inf")), 0)
    # 1 / (1 + 2^(each + log2 left - seen)); each is +inf while only forced blocks were attended to
    share = 1.0 / (1.0 + tl.math.exp2(each + tl.math.log2(tl.maximum(left, 1).to(tl.float32)) - seen))
    return tl.where(left <= 0, 1.0, share)


@triton.jit
def _round(
    q,
    k,
    v,
    k_params,
    v_params,
    table,
    lens,
    index,
    counts,
    acc,
    state,
    before,
    stopped,
    used,
    weight,
    kv_heads,
    capacity,
    previous,
    start,
    end,
    number,
    forced,
    threshold,
    stride_threshold,
    scale,
    stride_qb,
    stride_qh,
    stride_table,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_kp,
    stride_kph,
    stride_vp,
    stride_vph,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    MEAN: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    item = tl.program_id(0)
    split = tl.program_id(1)
    i_b = (item // kv_heads).to(tl.int64)
    i_h = (item % kv_heads).to(tl.int64)
    heads = tl.arange(0, BLOCK_M)
    seq_len = tl.load(lens + i_b)
    n = tl.minimum(tl.maximum(tl.load(counts + item), 0), capacity)
    n = tl.where(seq_len > 0, n, 0)
    go = True
    if not FIRST:
        # `stopped` is the round that is not run any more: an earlier one, or this one, which the item's first
        # program may write while the warps of another read it. They must not part over it, so this round's
        # number counts as still running, and all of them come to the same answer below.
        round_stopped = tl.load(stopped + item)
        go = (round_stopped < 0) | (round_stopped == number)
        if go:
            ranked = tl.minimum(start, n) - tl.maximum(previous, forced)
            share = _estimate(before, item, n - start, ranked, SPLITS, BLOCK_M, MEAN)
            failing = tl.sum(
                ((share <= tl.load(threshold + i_b * stride_threshold)) & (heads < GROUP)).to(tl.int32), 0
            )
            go = (failing > 0) & (n > start)
            if (not go) & (split == 0):
                tl.store(used + item, tl.minimum(start, n))
                tl.store(stopped + item, number)
                tl.store(weight + item * GROUP + heads, share, mask=heads < GROUP)
    if go:
        half: tl.constexpr = D // 2
        cols = tl.arange(0, half)
        at = (item * SPLITS + split).to(tl.int64)
        o_state = (item * 3 * SPLITS + split).to(tl.int64) * BLOCK_M + heads
        p_acc = acc + (at * GROUP + heads)[:, None] * D + cols[None, :]
        mask = (heads < GROUP)[:, None]
        acc_zero = tl.zeros([BLOCK_M], tl.float32)
        if FIRST:
            b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            b_sum = tl.zeros([BLOCK_M], tl.float32)
            part = tl.full([BLOCK_M], float("inf"), tl.float32)
            acc_low = tl.zeros([BLOCK_M, half], tl.float32)
            acc_high = tl.zeros([BLOCK_M, half], tl.float32)
        else:
            b_max = tl.load(before + o_state)
            b_sum = tl.load(before + SPLITS * BLOCK_M + o_state)
            part = tl.load(before + 2 * SPLITS * BLOCK_M + o_state)
            seen = mask & (b_sum > 0.0)[:, None]  # unwritten before
            acc_low = tl.load(p_acc, mask=seen, other=0.0)
            acc_high = tl.load(p_acc + half, mask=seen, other=0.0)
        if MEAN:  # of this round only
            part = tl.full([BLOCK_M], float("-inf"), tl.float32)
        until = tl.minimum(end, n)
        per_tile: tl.constexpr = max(1, BLOCK_N // BLOCK)  # whole blocks of a tile, or
        per_block: tl.constexpr = max(1, BLOCK // BLOCK_N)  # tiles of a block
        each = (tl.maximum(until - start, 0) + SPLITS - 1) // SPLITS
        each = (each + per_tile - 1) // per_tile * per_tile
        mine = start + split * each
        last = tl.minimum(mine + each, until)
        tile_at = mine // per_tile * per_block
        tile_end = tl.where(last > mine, (last + per_tile - 1) // per_tile * per_block, tile_at)
        row = i_b * stride_qb + i_h * GROUP * stride_qh
        q_low, q_high, q_sum = load_query(q, row, GROUP, stride_qh, GROUP, BLOCK_M, half)
        within = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)  # log sum of a block that spans tiles
        for tile in tl.range(tile_at, tile_end, num_stages=STAGES):
            slots, ok = tile_slots(
                tile,
                until,
                until,
                0,
                True,
                seq_len,
                index + item.to(tl.int64) * capacity,
                table + i_b * stride_table,
                PAGE,
                BLOCK,
                BLOCK_N,
            )
            scores, acc_low, acc_high, acc_zero, b_max, b_sum = attend_tile(
                q_low,
                q_high,
                q_sum,
                acc_low,
                acc_high,
                acc_zero,
                b_max,
                b_sum,
                slots,
                ok,
                k + i_h * stride_kh,
                v + i_h * stride_vh,
                k_params + i_h * stride_kph,
                v_params + i_h * stride_vph,
                stride_k,
                stride_v,
                stride_kp,
                stride_vp,
                scale,
                half,
                BITS,
                PRECISION,
            )
            logs = _lse(tl.reshape(scores, (BLOCK_M, per_tile, BLOCK_N // per_tile)), 2)
            rank = tile // per_block * per_tile + tl.arange(0, per_tile)
            counted = (rank >= forced) & (rank < until)
            if per_block > 1:
                fresh = tile % per_block == 0
                top = tl.maximum(logs, tl.where(fresh, float("-inf"), within))
                safe = tl.where(top == float("-inf"), 0.0, top)
                both = tl.math.exp2(logs - safe) + tl.where(fresh, 0.0, tl.math.exp2(within - safe))
                within = tl.where(
                    both > 0.0, safe + tl.math.log2(tl.where(both > 0.0, both, 1.0)), float("-inf")
                )
                logs = within
                counted = counted & ((tile + 1) % per_block == 0)
            if MEAN:
                added = _lse(tl.where(counted[None, :], logs, float("-inf")), 1)
                part = _lse(tl.join(part, added), 1)
            else:
                part = tl.minimum(part, tl.min(tl.where(counted[None, :], logs, float("inf")), 1))
        tl.store(state + o_state, b_max)
        tl.store(state + SPLITS * BLOCK_M + o_state, b_sum)
        tl.store(state + 2 * SPLITS * BLOCK_M + o_state, part)
        tl.store(p_acc, acc_low + acc_zero[:, None], mask=mask)
        tl.store(p_acc + half, acc_high + acc_zero[:, None], mask=mask)


@triton.jit
def _finish(
    out,
    weight,
    used,
    stopped,
    acc,
    states,
    lens,
    counts,
    kv_heads,
    capacity,
    rounds,
    round_stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    item = tl.program_id(0)
    i_g = tl.program_id(1)
    n = tl.minimum(tl.maximum(tl.load(counts + item), 0), capacity)
    n = tl.where(tl.load(lens + item // kv_heads) > 0, n, 0)
    stop = tl.load(stopped + item)
    o_row = item.to(tl.int64) * GROUP + i_g
    if stop < 0:  # ran to the end: the rounds cover the whole capacity
        stop = rounds
        tl.store(weight + o_row, 1.0)
        if i_g == 0:
            tl.store(used + item, n)
    state = states + (stop - 1).to(tl.int64) * round_stride
    splits = tl.arange(0, SPLITS)
    o_state = (item * 3 * SPLITS + splits).to(tl.int64) * BLOCK_M + i_g
    b_max = tl.load(state + o_state)
    b_sum = tl.load(state + SPLITS * BLOCK_M + o_state)
    some = b_sum > 0.0
    top = tl.max(tl.where(some, b_max, float("-inf")), 0)
    factor = tl.where(some, tl.math.exp2(b_max - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    total = tl.sum(tl.where(some, b_sum, 0.0) * factor, 0)
    cols = tl.arange(0, D)
    p_acc = acc + ((item * SPLITS + splits).to(tl.int64) * GROUP + i_g)[:, None] * D + cols[None, :]
    b_acc = tl.sum(tl.load(p_acc, mask=some[:, None], other=0.0) * factor[:, None], 0)
    tl.store(
        out + o_row * D + cols,
        tl.where(total > 0.0, b_acc / tl.where(total > 0.0, total, 1.0), 0.0).to(out.dtype.element_ty),
    )


def progressive_decode(
    q: torch.Tensor,
    k: KV,
    v: KV,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    threshold: float | torch.Tensor,
    ends: list[int],
    forced: int,
    bound: str,
    scale: float,
    bits: int,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``splits``: programs per (request, KV head), a power of two up to 64, to tune it."""
    batch, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    n_items = batch * kv_heads
    capacity = index.shape[2]
    tokens = min(
        tile_tokens(head_dim, q.element_size()), MAX_TILE
    )  # the rounds end at whole tiles of that size
    block_m = tile_rows(group)
    splits = splits or max(1, min(32, next_power_of_2(resident_programs(q, 8) // n_items)))
    acc = torch.empty(n_items, splits, group, head_dim, dtype=torch.float32, device=q.device)
    states = torch.empty(len(ends), n_items, 3, splits, block_m, dtype=torch.float32, device=q.device)
    stopped = torch.full((n_items,), -1, dtype=torch.int32, device=q.device)
    used = torch.empty(batch, kv_heads, dtype=torch.int32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    weight = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    k_values, k_params, *k_strides = kv_arguments(k)
    v_values, v_params, *v_strides = kv_arguments(v)
    # a fill, not a copy from the host: a CUDA graph can capture it
    thresholds = (
        threshold
        if isinstance(threshold, torch.Tensor)
        else torch.full((1,), threshold, dtype=torch.float32, device=q.device)
    )
    previous = start = 0
    for number, end in enumerate(ends):
        _round[(n_items, splits)](
            q,
            k_values,
            v_values,
            k_params,
            v_params,
            page_table,
            seq_lens,
            index,
            counts,
            acc,
            states[number],
            states[max(0, number - 1)],
            stopped,
            used,
            weight,
            kv_heads,
            capacity,
            previous,
            start,
            end,
            number,
            forced,
            thresholds,
            int(len(thresholds) > 1),
            scale / LN2,
            q.stride(0),
            q.stride(1),
            page_table.stride(0),
            k_strides[0],
            k_strides[1],
            v_strides[0],
            v_strides[1],
            k_strides[2],
            k_strides[3],
            v_strides[2],
            v_strides[3],
            GROUP=group,
            BLOCK_M=block_m,
            D=head_dim,
            PAGE=page_size,
            BLOCK=block_size,
            BLOCK_N=tokens,
            SPLITS=splits,
            BITS=bits,
            PRECISION=code_precision(q.dtype, bits),
            MEAN=bound == "round",
            FIRST=number == 0,
            STAGES=2 if q.element_size() == 4 else 5,
            num_warps=4,
        )
        previous, start = start, end
    _finish[(n_items, group)](
        out,
        weight,
        used,
        stopped,
        acc,
        states,
        seq_lens,
        counts,
        kv_heads,
        capacity,
        len(ends),
        states.stride(0),
        GROUP=group,
        BLOCK_M=block_m,
        D=head_dim,
        SPLITS=splits,
        num_warps=4,
    )
    return out, used, weight
