# mypy: disable-error-code="no-untyped-def"
"""Stream-K decode: the tiles of all (request, KV head) items form one list, split evenly over the programs.

A program's share may begin and end inside an item. It then leaves a partial result in segment ``program +
item``. That number is unique: along the list the program, the item or both advance. A second kernel merges
the segments of an item by their log-sum-exp.

Shapes in comments: M query rows of a group, N tokens of a tile, D head size, H = D / 2, I items rounded up, S
segments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import (
    FULL,
    SELECTED,
    STREAMING,
    Walk,
    attend_tile,
    empty_softmax,
    kv_at_head,
    load_query,
    tile_slots,
)
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.kv import rows_of
from ragserve_kernels.paged import (
    KVPair,
    PagedBatch,
    PageSelection,
    code_precision,
    kv_rows,
    resident_programs,
    tile_rows,
    tile_tokens,
)
from ragserve_kernels.sparse_decode.types import HeadKinds

LN2 = math.log(2.0)
FEW_TOKENS = 2 * 132 * 128
"""Tokens times KV heads up to which a launch is too small to fill the chip twice over."""


class _Items(NamedTuple):
    """The lengths, selections and head kinds that decide the walks of all items."""

    p_lens: Any  # int32 [batch]
    p_counts: Any  # int32 [batch, kv_heads]
    p_kinds: Any  # int32 [kv_heads] or [batch, kv_heads]
    stride_kinds: Any
    kv_heads: Any
    capacity: Any
    sink: Any
    local: Any


@triton.jit
def _walk(
    items,
    i_item,
    m_item,
    BLOCK: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_KINDS: tl.constexpr,
):
    """Return the walks of items; ``i_item`` and the results are scalars or vectors [I]."""
    i_b = i_item // items.kv_heads
    i_h = i_item % items.kv_heads
    # [I]
    n_len = tl.load(items.p_lens + i_b, mask=m_item, other=0)
    n_total = (n_len + BLOCK - 1) // BLOCK
    zero = n_total * 0
    if HAS_KINDS:
        # [I]
        b_kind = tl.load(items.p_kinds + i_b * items.stride_kinds + i_h, mask=m_item, other=0)
    elif HAS_INDEX:
        b_kind = zero + SELECTED
    else:
        b_kind = zero + FULL
    n_sink = tl.minimum(zero + (items.sink + BLOCK - 1) // BLOCK, n_total)
    i_local = tl.maximum(tl.maximum(n_len - items.local, 0) // BLOCK, n_sink)
    m_streaming = b_kind == STREAMING
    n_blocks = tl.where(m_streaming, n_sink + n_total - i_local, n_total)
    n_gap = tl.where(m_streaming, i_local - n_sink, 0)
    m_indexed = (b_kind == SELECTED) & (n_len > 0)
    if HAS_INDEX:
        # [I]
        n_count = tl.load(items.p_counts + i_item, mask=m_item, other=0)
        n_blocks = tl.where(m_indexed, tl.minimum(tl.maximum(n_count, 0), items.capacity), n_blocks)
    else:
        m_indexed = m_indexed & False
    return Walk(n_blocks, n_sink, n_gap, m_indexed, n_len)


@triton.jit(do_not_specialize=["n_items"])
def _attend(
    q,  # HeadRows of [batch, heads, D]
    kv,  # KVRows of [slots, kv_heads, D], or codes
    items,  # _Items
    p_table,  # int32 [batch, max_pages]
    p_index,  # int32 [batch, kv_heads, capacity]
    p_out,  # [batch, heads, D]
    p_lse,  # float32 [batch, heads]
    p_part,  # float32 [segments, GROUP, D]
    p_part_lse,  # float32 [segments, GROUP], base 2
    p_spans,  # int32 [items, 2]: first and last (exclusive) program of an item
    n_items,
    scale_2,
    stride_table,
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
    i_program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    o_item = tl.arange(0, ITEMS)
    m_item = o_item < n_items
    b_blocks = _walk(items, o_item, m_item, BLOCK, HAS_INDEX, HAS_KINDS).n_blocks
    # [I]: tiles of each item, and where they end in the list
    b_tiles = tl.where(m_item, (b_blocks * BLOCK + BLOCK_N - 1) // BLOCK_N, 0)
    b_ends = tl.cumsum(b_tiles, 0)
    n_total = tl.sum(b_tiles, 0).to(tl.int64)
    # every worker has a tile; the other programs have none
    n_workers = tl.minimum(n_programs, tl.maximum(n_total, 1))
    i_at = tl.minimum(n_total * i_program // n_workers, n_total).to(tl.int32)
    i_stop = tl.minimum(n_total * (i_program + 1) // n_workers, n_total).to(tl.int32)
    # for the merge: the workers [from, to) that hold an item's tiles [ends - tiles, ends)
    if i_program == n_programs - 1:
        n_some = tl.maximum(n_total, 1)
        b_from = ((b_ends - b_tiles + 1).to(tl.int64) * n_workers - 1) // n_some
        b_to = (b_ends.to(tl.int64) * n_workers - 1) // n_some + 1
        tl.store(p_spans + o_item * 2, tl.where(b_tiles > 0, b_from, 0).to(tl.int32), mask=o_item < n_items)
        tl.store(p_spans + o_item * 2 + 1, tl.where(b_tiles > 0, b_to, 0).to(tl.int32), mask=o_item < n_items)
    HALF: tl.constexpr = D // 2
    o_head = tl.arange(0, BLOCK_M)
    o_dim = tl.arange(0, HALF)
    while i_at < i_stop:
        i_item = tl.sum((b_ends <= i_at).to(tl.int32), 0)
        i_b = i_item // items.kv_heads
        i_h = i_item % items.kv_heads
        n_tiles = tl.sum(tl.where(o_item == i_item, b_tiles, 0), 0)
        i_first = tl.sum(tl.where(o_item == i_item, b_ends, 0), 0) - n_tiles
        walk = _walk(items, i_item, True, BLOCK, HAS_INDEX, HAS_KINDS)
        query = load_query(q, i_b.to(tl.int64), i_h, GROUP, BLOCK_M, HALF)
        softmax = empty_softmax(BLOCK_M, HALF)
        p_index_row = p_index + i_item.to(tl.int64) * items.capacity
        p_table_row = p_table + i_b.to(tl.int64) * stride_table
        head_kv = kv_at_head(kv, i_h.to(tl.int64))
        i_until = tl.minimum(i_stop - i_first, n_tiles)
        for i_tile in tl.range(i_at - i_first, i_until, num_stages=STAGES):
            i_slot, m_slot = tile_slots(i_tile, walk, p_index_row, p_table_row, PAGE, BLOCK, BLOCK_N)
            _b_s, softmax = attend_tile(
                query, softmax, head_kv, i_slot, m_slot, scale_2, HALF, BITS, PRECISION
            )
        # an item whose blocks hold no token (all skipped) has sum 0 and gives zero
        m_some = softmax.b_sum > 0.0
        b_sum = tl.where(m_some, softmax.b_sum, 1.0)
        b_share = tl.where(m_some, 1.0 / b_sum, 0.0)
        b_lse = tl.where(m_some, softmax.b_max + tl.math.log2(b_sum), float("-inf"))
        b_low = (softmax.b_low + softmax.b_zero[:, None]) * b_share[:, None]
        b_high = (softmax.b_high + softmax.b_zero[:, None]) * b_share[:, None]
        m_head = (o_head < GROUP)[:, None]
        if (i_at == i_first) & (i_until == n_tiles):  # the whole item: no merge
            o_row = i_item.to(tl.int64) * GROUP + o_head
            p_out_row = p_out + o_row[:, None] * D + o_dim[None, :]
            tl.store(p_out_row, b_low.to(p_out.dtype.element_ty), mask=m_head)
            tl.store(p_out_row + HALF, b_high.to(p_out.dtype.element_ty), mask=m_head)
            if HAS_LSE:
                tl.store(p_lse + o_row, b_lse * 0.6931471805599453, mask=o_head < GROUP)
        else:
            o_part = (i_program + i_item).to(tl.int64) * GROUP + o_head
            p_part_row = p_part + o_part[:, None] * D + o_dim[None, :]
            tl.store(p_part_row, b_low, mask=m_head)
            tl.store(p_part_row + HALF, b_high, mask=m_head)
            tl.store(p_part_lse + o_part, b_lse, mask=o_head < GROUP)
        i_at = i_first + i_until


@triton.jit
def _merge(
    p_out,
    p_lse,
    p_part,
    p_part_lse,
    p_spans,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    i_item = tl.program_id(0)
    i_g = tl.program_id(1)
    i_from = tl.load(p_spans + i_item * 2)
    i_to = tl.load(p_spans + i_item * 2 + 1)
    o_dim = tl.arange(0, D)
    o_row = i_item.to(tl.int64) * GROUP + i_g
    if i_to == i_from:  # no tiles
        tl.store(p_out + o_row * D + o_dim, tl.zeros([D], p_out.dtype.element_ty))
        if HAS_LSE:
            tl.store(p_lse + o_row, float("-inf"))
    elif i_to - i_from > 1:  # else its one program has written the result
        b_max = tl.full([], float("-inf"), tl.float32)
        b_sum = tl.full([], 0.0, tl.float32)
        b_acc = tl.zeros([D], tl.float32)
        for i_at in range(i_from, i_to, SEGMENTS):
            i_segment = i_at + tl.arange(0, SEGMENTS)
            m_segment = i_segment < i_to
            o_part = (i_segment + i_item).to(tl.int64) * GROUP + i_g
            # [S]
            b_lse = tl.load(p_part_lse + o_part, mask=m_segment, other=float("-inf"))
            # [S, D]
            b_part = tl.load(
                p_part + o_part[:, None] * D + o_dim[None, :], mask=m_segment[:, None], other=0.0
            )
            b_new = tl.maximum(b_max, tl.max(b_lse, 0))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_weight = tl.math.exp2(b_lse - b_base)
            b_decay = tl.math.exp2(b_max - b_base)
            b_acc = b_acc * b_decay + tl.sum(b_part * b_weight[:, None], 0)
            b_sum = b_sum * b_decay + tl.sum(b_weight, 0)
            b_max = b_new
        m_some = b_sum > 0.0
        b_divisor = tl.where(m_some, b_sum, 1.0)
        tl.store(
            p_out + o_row * D + o_dim, tl.where(m_some, b_acc / b_divisor, 0.0).to(p_out.dtype.element_ty)
        )
        if HAS_LSE:
            tl.store(
                p_lse + o_row,
                tl.where(m_some, (b_max + tl.math.log2(b_divisor)) * 0.6931471805599453, float("-inf")),
            )


def launch_options(head_dim: int, itemsize: int, few: bool) -> tuple[int, int, int, int]:
    """Return ``(tokens per tile, warps, stages, programs per multiprocessor)``, as measured on the H200.

    ``few``: there are at most two tiles per program."""
    if itemsize == 4:
        return tile_tokens(head_dim, itemsize), 4, 2, 1
    tokens = 8192 // max(128, head_dim)
    return (2 * tokens, 4, 5, 1) if few else (tokens, 4, 5, 2)


def sparse_decode(
    q: torch.Tensor,
    kv: KVPair,
    batch: PagedBatch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    selection: PageSelection | None,
    heads: HeadKinds | None,
    scale: float,
    programs: int | None,
    bits: int,
) -> None:
    """Launch both kernels; arguments as in :func:`ragserve_kernels.sparse_decode.sparse_decode`."""
    query_heads, head_dim = q.shape[1:]
    kv_heads = kv[0].shape[1]
    group = query_heads // kv_heads
    n_items = batch.size * kv_heads
    absent = batch.seq_lens  # stands for an absent pointer
    index, counts = selection if selection is not None else (absent, absent)
    capacity = index.shape[2] if selection is not None else 0
    kinds, sink, local = heads if heads is not None else (absent, 0, 0)
    few = selection is not None and heads is None and n_items * capacity * batch.block_size <= FEW_TOKENS
    tokens, warps, stages, resident = launch_options(head_dim, q.element_size(), few)
    programs = programs or resident_programs(q, resident)
    part = torch.empty(programs + n_items, group, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(programs + n_items, group, dtype=torch.float32, device=q.device)
    spans = torch.empty(n_items, 2, dtype=torch.int32, device=q.device)
    stride_kinds = kinds.stride(0) if kinds.dim() == 2 else 0
    items = _Items(batch.seq_lens, counts, kinds, stride_kinds, kv_heads, capacity, sink, local)
    _attend[(programs,)](
        rows_of(q),
        kv_rows(kv),
        items,
        batch.page_table,
        index,
        out,
        part_lse if lse is None else lse,
        part,
        part_lse,
        spans,
        n_items,
        scale / LN2,
        batch.page_table.stride(0),
        GROUP=group,
        BLOCK_M=tile_rows(group),
        D=head_dim,
        PAGE=batch.page_size,
        BLOCK=batch.block_size,
        BLOCK_N=tokens,
        ITEMS=next_power_of_2(n_items),
        BITS=bits,
        PRECISION=code_precision(q.dtype, bits),
        HAS_INDEX=selection is not None,
        HAS_KINDS=heads is not None,
        HAS_LSE=lse is not None,
        STAGES=stages,
        num_warps=warps,
    )
    _merge[(n_items, group)](
        out,
        part_lse if lse is None else lse,
        part,
        part_lse,
        spans,
        GROUP=group,
        D=head_dim,
        SEGMENTS=16 if head_dim <= 128 else 8,
        HAS_LSE=lse is not None,
        num_warps=4,
    )
