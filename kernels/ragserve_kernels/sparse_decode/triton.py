# mypy: disable-error-code="no-untyped-def"
"""Stream-K decode: the tiles of all (request, KV head) items form one list, and every program takes an equal
share of it.

A program's share may begin and end inside an item: it then leaves a partial result in segment ``program +
item``. That number is unique, because going along the list either the program or the item (or both) advances.
A second kernel merges the segments of an item by their log-sum-exp."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import FULL, SELECTED, STREAMING, attend_tile, load_query, tile_slots
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.paged import KV, code_precision, kv_arguments, resident_programs, tile_rows, tile_tokens

LN2 = math.log(2.0)
FEW_TOKENS = 2 * 132 * 128
"""Tokens times KV heads up to which a launch is too small to fill the chip twice over."""


@triton.jit
def _walk(
    b,
    h,
    ok,
    lens,
    counts,
    kinds,
    stride_kinds,
    kv_heads,
    capacity,
    sink,
    local,
    BLOCK: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_KINDS: tl.constexpr,
):
    """``(blocks, gap_at, gap, indexed, seq_len)`` of items ``(b, h)``, scalars or vectors: see
    ``tile_slots``.
    """
    seq_len = tl.load(lens + b, mask=ok, other=0)
    total = (seq_len + BLOCK - 1) // BLOCK
    zero = total * 0
    if HAS_KINDS:
        kind = tl.load(kinds + b * stride_kinds + h, mask=ok, other=0)
    elif HAS_INDEX:
        kind = zero + SELECTED
    else:
        kind = zero + FULL
    sinks = tl.minimum(zero + (sink + BLOCK - 1) // BLOCK, total)
    locals_from = tl.maximum(tl.maximum(seq_len - local, 0) // BLOCK, sinks)
    streaming = kind == STREAMING
    blocks = tl.where(streaming, sinks + total - locals_from, total)
    gap = tl.where(streaming, locals_from - sinks, 0)
    indexed = (kind == SELECTED) & (seq_len > 0)
    if HAS_INDEX:
        count = tl.load(counts + b * kv_heads + h, mask=ok, other=0)
        blocks = tl.where(indexed, tl.minimum(tl.maximum(count, 0), capacity), blocks)
    else:
        indexed = indexed & False
    return blocks, sinks, gap, indexed, seq_len


@triton.jit
def _attend(
    q,
    k,
    v,
    k_params,
    v_params,
    table,
    lens,
    index,
    counts,
    kinds,
    out,
    lse,
    part_out,
    part_lse,
    spans,
    n_items,
    stride_kinds,
    kv_heads,
    capacity,
    sink,
    local,
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
    ITEMS: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_KINDS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    items = tl.arange(0, ITEMS)
    known = items < n_items
    blocks, _gap_at, _gap, _indexed, _len = _walk(
        items // kv_heads,
        items % kv_heads,
        known,
        lens,
        counts,
        kinds,
        stride_kinds,
        kv_heads,
        capacity,
        sink,
        local,
        BLOCK,
        HAS_INDEX,
        HAS_KINDS,
    )
    tiles = tl.where(known, (blocks * BLOCK + BLOCK_N - 1) // BLOCK_N, 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0).to(tl.int64)
    workers = tl.minimum(
        programs, tl.maximum(total, 1)
    )  # every worker has a tile; the other programs have none
    at = tl.minimum(total * program // workers, total).to(tl.int32)
    stop = tl.minimum(total * (program + 1) // workers, total).to(tl.int32)
    if (
        program == programs - 1
    ):  # for the merge: the workers [from, to) that hold an item's tiles [ends - tiles, ends)
        some = tl.maximum(total, 1)
        span_from = ((ends - tiles + 1).to(tl.int64) * workers - 1) // some
        span_to = (ends.to(tl.int64) * workers - 1) // some + 1
        tl.store(spans + items * 2, tl.where(tiles > 0, span_from, 0).to(tl.int32), mask=items < n_items)
        tl.store(spans + items * 2 + 1, tl.where(tiles > 0, span_to, 0).to(tl.int32), mask=items < n_items)
    half: tl.constexpr = D // 2
    heads = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, half)
    while at < stop:
        item = tl.sum((ends <= at).to(tl.int32), 0)
        i_b = item // kv_heads
        i_h = item % kv_heads
        n_tiles = tl.sum(tl.where(items == item, tiles, 0), 0)
        first = tl.sum(tl.where(items == item, ends, 0), 0) - n_tiles
        n_blocks, gap_at, gap, indexed, seq_len = _walk(
            i_b,
            i_h,
            True,
            lens,
            counts,
            kinds,
            stride_kinds,
            kv_heads,
            capacity,
            sink,
            local,
            BLOCK,
            HAS_INDEX,
            HAS_KINDS,
        )
        row = i_b.to(tl.int64) * stride_qb + i_h * GROUP * stride_qh
        q_low, q_high, q_sum = load_query(q, row, GROUP, stride_qh, GROUP, BLOCK_M, half)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        acc_zero = tl.zeros([BLOCK_M], tl.float32)
        acc_low = tl.zeros([BLOCK_M, half], tl.float32)
        acc_high = tl.zeros([BLOCK_M, half], tl.float32)
        index_row = index + item.to(tl.int64) * capacity
        table_row = table + i_b.to(tl.int64) * stride_table
        head = i_h.to(tl.int64)
        until = tl.minimum(stop - first, n_tiles)
        for tile in tl.range(at - first, until, num_stages=STAGES):
            slots, ok = tile_slots(
                tile, n_blocks, gap_at, gap, indexed, seq_len, index_row, table_row, PAGE, BLOCK, BLOCK_N
            )
            _scores, acc_low, acc_high, acc_zero, b_max, b_sum = attend_tile(
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
                k + head * stride_kh,
                v + head * stride_vh,
                k_params + head * stride_kph,
                v_params + head * stride_vph,
                stride_k,
                stride_v,
                stride_kp,
                stride_vp,
                scale,
                half,
                BITS,
                PRECISION,
            )
        # an item whose blocks hold no token (all skipped) has sum 0 and gives zero
        held = b_sum > 0.0
        share = tl.where(held, 1.0 / tl.where(held, b_sum, 1.0), 0.0)
        b_lse = tl.where(held, b_max + tl.math.log2(tl.where(held, b_sum, 1.0)), float("-inf"))
        r_low = (acc_low + acc_zero[:, None]) * share[:, None]
        r_high = (acc_high + acc_zero[:, None]) * share[:, None]
        mask = (heads < GROUP)[:, None]
        if (at == first) & (until == n_tiles):  # the whole item: no merge
            o_row = item.to(tl.int64) * GROUP + heads
            p_out = out + o_row[:, None] * D + cols[None, :]
            tl.store(p_out, r_low.to(out.dtype.element_ty), mask=mask)
            tl.store(p_out + half, r_high.to(out.dtype.element_ty), mask=mask)
            if HAS_LSE:
                tl.store(lse + o_row, b_lse * 0.6931471805599453, mask=heads < GROUP)
        else:
            p_row = (program + item).to(tl.int64) * GROUP + heads
            p_part = part_out + p_row[:, None] * D + cols[None, :]
            tl.store(p_part, r_low, mask=mask)
            tl.store(p_part + half, r_high, mask=mask)
            tl.store(part_lse + p_row, b_lse, mask=heads < GROUP)
        at = first + until


@triton.jit
def _merge(
    out,
    lse,
    part_out,
    part_lse,
    spans,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    item = tl.program_id(0)
    i_g = tl.program_id(1)
    span_from = tl.load(spans + item * 2)
    span_to = tl.load(spans + item * 2 + 1)
    cols = tl.arange(0, D)
    o_row = item.to(tl.int64) * GROUP + i_g
    if span_to == span_from:  # no tiles
        tl.store(out + o_row * D + cols, tl.zeros([D], out.dtype.element_ty))
        if HAS_LSE:
            tl.store(lse + o_row, float("-inf"))
    elif span_to - span_from > 1:  # else its one program has written the result
        b_max = tl.full([], float("-inf"), tl.float32)
        b_sum = tl.full([], 0.0, tl.float32)
        acc = tl.zeros([D], tl.float32)
        for at in range(span_from, span_to, SEGMENTS):
            segment = at + tl.arange(0, SEGMENTS)
            held = segment < span_to
            p_row = (segment + item).to(tl.int64) * GROUP + i_g
            b_lse = tl.load(part_lse + p_row, mask=held, other=float("-inf"))
            b_part = tl.load(part_out + p_row[:, None] * D + cols[None, :], mask=held[:, None], other=0.0)
            new_max = tl.maximum(b_max, tl.max(b_lse, 0))
            safe = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.math.exp2(b_lse - safe)
            alpha = tl.math.exp2(b_max - safe)
            acc = acc * alpha + tl.sum(b_part * weight[:, None], 0)
            b_sum = b_sum * alpha + tl.sum(weight, 0)
            b_max = new_max
        some = b_sum > 0.0
        divisor = tl.where(some, b_sum, 1.0)
        tl.store(out + o_row * D + cols, tl.where(some, acc / divisor, 0.0).to(out.dtype.element_ty))
        if HAS_LSE:
            tl.store(
                lse + o_row,
                tl.where(some, (b_max + tl.math.log2(divisor)) * 0.6931471805599453, float("-inf")),
            )


def launch_options(head_dim: int, itemsize: int, few: bool) -> tuple[int, int, int, int]:
    """``(tokens per tile, warps, stages, programs per multiprocessor)``, as measured on the H200; ``few``: at
    most two tiles a program.
    """
    if itemsize == 4:
        return tile_tokens(head_dim, itemsize), 4, 2, 1
    tokens = 8192 // max(128, head_dim)
    return (2 * tokens, 4, 5, 1) if few else (tokens, 4, 5, 2)


def sparse_decode(
    q: torch.Tensor,
    k: KV,
    v: KV,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    page_size: int,
    block_size: int,
    index: torch.Tensor | None,
    counts: torch.Tensor | None,
    kinds: torch.Tensor | None,
    sink_tokens: int,
    local_tokens: int,
    scale: float,
    programs: int | None,
    bits: int,
    options: tuple[int, int, int, int] | None = None,
) -> None:
    """``options``: as :func:`launch_options`, to tune them."""
    batch, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    n_items = batch * kv_heads
    capacity = index.shape[2] if index is not None else 0
    few = index is not None and kinds is None and n_items * capacity * block_size <= FEW_TOKENS
    tokens, warps, stages, resident = options or launch_options(head_dim, q.element_size(), few)
    programs = programs or resident_programs(q, resident)
    part_out = torch.empty(programs + n_items, group, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(programs + n_items, group, dtype=torch.float32, device=q.device)
    k_values, k_params, *k_strides = kv_arguments(k)
    v_values, v_params, *v_strides = kv_arguments(v)
    none = seq_lens  # stands for an absent pointer
    spans = torch.empty(n_items, 2, dtype=torch.int32, device=q.device)
    _attend[(programs,)](
        q,
        k_values,
        v_values,
        k_params,
        v_params,
        page_table,
        seq_lens,
        none if index is None else index,
        none if counts is None else counts,
        none if kinds is None else kinds,
        out,
        part_lse if lse is None else lse,
        part_out,
        part_lse,
        spans,
        n_items,
        0 if kinds is None or kinds.dim() == 1 else kinds.stride(0),
        kv_heads,
        capacity,
        sink_tokens,
        local_tokens,
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
        BLOCK_M=tile_rows(group),
        D=head_dim,
        PAGE=page_size,
        BLOCK=block_size,
        BLOCK_N=tokens,
        ITEMS=next_power_of_2(n_items),
        BITS=bits,
        PRECISION=code_precision(q.dtype, bits),
        HAS_INDEX=index is not None,
        HAS_KINDS=kinds is not None,
        HAS_LSE=lse is not None,
        STAGES=stages,
        num_warps=warps,
    )
    _merge[(n_items, group)](
        out,
        part_lse if lse is None else lse,
        part_out,
        part_lse,
        spans,
        GROUP=group,
        D=head_dim,
        SEGMENTS=16 if head_dim <= 128 else 8,
        HAS_LSE=lse is not None,
        num_warps=4,
    )
