# mypy: disable-error-code="no-untyped-def"
"""PSA's rounds as a fixed chain of launches; a (request, KV head) past the threshold exits at once.

Each item's round is split over a fixed number of programs. A program keeps its part of the output in place
over the rounds. The log sums that the stopping rule needs go to a buffer per round, because the programs of
the next round all read them while they already write their own.

Shapes in comments: M query rows of a group, N tokens of a tile, D head size, H = D / 2."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import (
    Softmax,
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
from ragserve_kernels.progressive_decode.addresses import (
    SOME_CONTEXT,
    SOME_CONTEXT_FILL,
    SOME_FILL,
    Reading,
    addresses,
)
from ragserve_kernels.progressive_decode.finish import finish
from ragserve_kernels.progressive_decode.placed_tiles import (
    attend_context,
    attend_placed,
    fill_context,
    fill_placed,
    load_context_query,
)
from ragserve_kernels.progressive_decode.stopping_rule import bounded, estimate
from ragserve_kernels.progressive_decode.types import MAX_TILE, PagePlaces, Progressive

LN2 = math.log(2.0)
# Tokens of a page: with heads of 128 as many programs run at once as without contexts. Never of several
# pages: codes of such tiles are more than Triton 3.6 compiles.
CONTEXT_TILE = 32


@triton.jit(do_not_specialize=["n_parts", "i_first_list"])
def _round(
    q,  # HeadRows of [batch, heads, D]
    kv,  # KVRows of [slots, kv_heads, D], or codes
    p_table,  # int32 [batch, max_pages], or those of `addresses`
    p_lens,  # int32 [batch]
    p_index,  # int32 [batch, kv_heads, capacity]
    p_counts,  # int32 [batch, kv_heads]
    p_acc,  # float32 [items, SPLITS, GROUP, D]
    p_state,  # float32 [items, 3, SPLITS, M], of this round
    p_before,  # the same of the round before
    p_stopped,  # int32 [items]
    p_used,  # int32 [items]
    p_weight,  # float32 [items, GROUP]
    kv_heads,
    capacity,
    i_previous,
    i_start,
    i_end,
    i_round,
    n_forced,
    p_threshold,  # float32 [batch] or [1]
    stride_threshold,
    scale_2,
    stride_table,
    contexts,  # Contexts; read with CONTEXTS
    form,  # RowForm of these
    i_first_list,  # of the layer: layer * KV heads; likewise
    p_fills,  # see `Addresses`; read with CELLS
    p_kinds,  # int32 [items, n_parts], likewise; read with CONTEXTS or CELLS
    n_parts,
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
    PLACED: tl.constexpr,  # the table has addresses, int64 [batch, kv_heads, stride_table, 2]
    CELLS: tl.constexpr,  # some pages on the host may fill shared blocks
    CONTEXTS: tl.constexpr,  # some may be those of contexts
    CONTEXT_N: tl.constexpr,  # tokens of a tile of these
    PARTS: tl.constexpr,  # n_parts, rounded up
    STAGES: tl.constexpr,
):
    i_item = tl.program_id(0)
    i_split = tl.program_id(1)
    i_b = (i_item // kv_heads).to(tl.int64)
    i_h = (i_item % kv_heads).to(tl.int64)
    o_head = tl.arange(0, BLOCK_M)
    n_len = tl.load(p_lens + i_b)
    n_ranked = tl.minimum(tl.maximum(tl.load(p_counts + i_item), 0), capacity)
    n_ranked = tl.where(n_len > 0, n_ranked, 0)
    m_go = True
    if not FIRST:
        # p_stopped holds the first round that is not run: an earlier one or this one, which the item's first
        # program may be writing while the warps of another read it. The warps must agree, so this round's
        # number counts as still running, and all of them come to the same answer below.
        i_stopped = tl.load(p_stopped + i_item)
        m_go = (i_stopped < 0) | (i_stopped == i_round)
        if m_go:
            n_bound = tl.minimum(i_start, n_ranked) - tl.maximum(i_previous, n_forced)
            b_share = estimate(p_before, i_item, n_ranked - i_start, n_bound, SPLITS, BLOCK_M, MEAN)
            n_failing = tl.sum(
                ((b_share <= tl.load(p_threshold + i_b * stride_threshold)) & (o_head < GROUP)).to(tl.int32),
                0,
            )
            m_go = (n_failing > 0) & (n_ranked > i_start)
            if (not m_go) & (i_split == 0):
                tl.store(p_used + i_item, tl.minimum(i_start, n_ranked))
                tl.store(p_stopped + i_item, i_round)
                tl.store(p_weight + i_item * GROUP + o_head, b_share, mask=o_head < GROUP)
    if m_go:
        i_until = tl.minimum(i_end, n_ranked)
        PER_TILE: tl.constexpr = max(1, BLOCK_N // BLOCK)  # whole blocks of a tile, or
        PER_BLOCK: tl.constexpr = max(1, BLOCK // BLOCK_N)  # tiles of a block
        n_each = (tl.maximum(i_until - i_start, 0) + SPLITS - 1) // SPLITS
        n_each = (n_each + PER_TILE - 1) // PER_TILE * PER_TILE
        i_mine = i_start + i_split * n_each
        i_last = tl.minimum(i_mine + n_each, i_until)
        i_first_tile = i_mine // PER_TILE * PER_BLOCK
        i_end_tile = tl.where(i_last > i_mine, (i_last + PER_TILE - 1) // PER_TILE * PER_BLOCK, i_first_tile)
        walk = Walk(i_until, i_until, 0, True, n_len)
        p_index_row = p_index + i_item.to(tl.int64) * capacity
        p_table_row = p_table + (i_item.to(tl.int64) * 2 if PLACED else i_b) * stride_table
        C_PER_BLOCK: tl.constexpr = BLOCK // CONTEXT_N
        DTYPE: tl.constexpr = q.p.dtype.element_ty
        if CONTEXTS or CELLS:
            o_part = tl.arange(0, PARTS)
            b_kinds = tl.load(p_kinds + i_item * n_parts + o_part, mask=o_part < n_parts, other=0)
            i_list = i_first_list.to(tl.int64) + i_h
        if CELLS:
            # before all else, as it takes registers: pages are read below where they are written here
            p_fill_row = p_fills + i_item.to(tl.int64) * 2 * stride_table
            if tl.max(b_kinds & SOME_FILL, 0) > 0:
                for i_tile in tl.range(i_mine * C_PER_BLOCK, i_last * C_PER_BLOCK, num_stages=1):
                    fill_placed(
                        i_tile,
                        walk,
                        p_index_row,
                        p_table_row,
                        p_fill_row,
                        kv.k.stride,
                        D,
                        PAGE,
                        CONTEXT_N,
                        DTYPE,
                    )
            if CONTEXTS:
                n_some = tl.max(b_kinds & SOME_CONTEXT_FILL, 0)
                if n_some > 0:
                    for i_tile in tl.range(i_mine * C_PER_BLOCK, i_last * C_PER_BLOCK, num_stages=1):
                        fill_context(
                            i_tile,
                            walk,
                            p_index_row,
                            p_table_row,
                            p_fill_row,
                            kv.k.stride,
                            contexts,
                            i_list,
                            form,
                            PAGE,
                            CONTEXT_N,
                            DTYPE,
                        )
            tl.debug_barrier()  # what a thread has written others of the program read
        HALF: tl.constexpr = D // 2
        o_dim = tl.arange(0, HALF)
        i_segment = (i_item * SPLITS + i_split).to(tl.int64)
        o_state = (i_item * 3 * SPLITS + i_split).to(tl.int64) * BLOCK_M + o_head
        p_acc_row = p_acc + (i_segment * GROUP + o_head)[:, None] * D + o_dim[None, :]
        m_head = (o_head < GROUP)[:, None]
        if FIRST:
            softmax = empty_softmax(BLOCK_M, HALF)
            b_part = tl.full([BLOCK_M], float("inf"), tl.float32)
        else:
            # [M] each
            b_max = tl.load(p_before + o_state)
            b_sum = tl.load(p_before + SPLITS * BLOCK_M + o_state)
            b_part = tl.load(p_before + 2 * SPLITS * BLOCK_M + o_state)
            m_seen = m_head & (b_sum > 0.0)[:, None]  # else not written yet
            # [M, H] each
            b_low = tl.load(p_acc_row, mask=m_seen, other=0.0)
            b_high = tl.load(p_acc_row + HALF, mask=m_seen, other=0.0)
            softmax = Softmax(b_low, b_high, tl.zeros([BLOCK_M], tl.float32), b_max, b_sum)
        if MEAN:  # the bound is that of this round only
            b_part = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_within = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)  # log sum of a block that spans tiles
        query = load_query(q, i_b, i_h, GROUP, BLOCK_M, HALF)
        if not PLACED:
            head_kv = kv_at_head(kv, i_h)
        for i_tile in tl.range(i_first_tile, i_end_tile, num_stages=STAGES):
            if PLACED:
                b_s, softmax = attend_placed(
                    i_tile,
                    walk,
                    p_index_row,
                    p_table_row,
                    kv.k.stride,
                    query,
                    softmax,
                    scale_2,
                    D,
                    PAGE,
                    BLOCK_N,
                    PRECISION,
                    CONTEXTS,
                )
            else:
                i_slot, m_slot = tile_slots(i_tile, walk, p_index_row, p_table_row, PAGE, BLOCK, BLOCK_N)
                b_s, softmax = attend_tile(
                    query, softmax, head_kv, i_slot, m_slot, scale_2, HALF, BITS, PRECISION
                )
            b_part, b_within = bounded(
                b_s, b_part, b_within, i_tile, n_forced, i_until, PER_TILE, PER_BLOCK, MEAN, CONTEXTS
            )
        if CONTEXTS:
            # pages of contexts after all others, as few requests have any, and in parts: turning keys takes
            # registers
            n_some = tl.max(b_kinds & SOME_CONTEXT, 0)
            if n_some > 0:
                p_group = q.p + i_b * q.stride + i_h * GROUP * q.stride_head
                turning = load_context_query(p_group, q.stride_head, m_head, form, BLOCK_M)
                b_within = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)
                for i_tile in tl.range(i_mine * C_PER_BLOCK, i_last * C_PER_BLOCK, num_stages=1):
                    b_s, softmax = attend_context(
                        i_tile,
                        walk,
                        p_index_row,
                        p_table_row,
                        contexts,
                        i_list,
                        turning,
                        softmax,
                        scale_2,
                        form,
                        PAGE,
                        CONTEXT_N,
                        PRECISION,
                    )
                    b_part, b_within = bounded(
                        b_s, b_part, b_within, i_tile, n_forced, i_until, 1, C_PER_BLOCK, MEAN, True
                    )
        tl.store(p_state + o_state, softmax.b_max)
        tl.store(p_state + SPLITS * BLOCK_M + o_state, softmax.b_sum)
        tl.store(p_state + 2 * SPLITS * BLOCK_M + o_state, b_part)
        tl.store(p_acc_row, softmax.b_low + softmax.b_zero[:, None], mask=m_head)
        tl.store(p_acc_row + HALF, softmax.b_high + softmax.b_zero[:, None], mask=m_head)


def progressive_decode(
    q: torch.Tensor,
    kv: KVPair,
    batch: PagedBatch,
    ranking: PageSelection,
    threshold: float | torch.Tensor,
    ends: list[int],
    places: PagePlaces | None,
    *,
    forced: int,
    bound: str,
    scale: float,
    bits: int,
) -> Progressive:
    """Launch the rounds; ``ends``: the rank at which each of them ends."""
    heads, head_dim = q.shape[1:]
    kv_heads = kv[0].shape[1]
    group = heads // kv_heads
    n_items = batch.size * kv_heads
    capacity = ranking.blocks.shape[2]
    # rounds end at whole tiles of MAX_TILE tokens
    tokens = min(tile_tokens(head_dim, q.element_size()), MAX_TILE)
    block_m = tile_rows(group)
    splits = max(1, min(32, next_power_of_2(resident_programs(q, 8) // n_items)))
    acc = torch.empty(n_items, splits, group, head_dim, dtype=torch.float32, device=q.device)
    states = torch.empty(len(ends), n_items, 3, splits, block_m, dtype=torch.float32, device=q.device)
    stopped = torch.full((n_items,), -1, dtype=torch.int32, device=q.device)
    used = torch.empty(batch.size, kv_heads, dtype=torch.int32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    weight = torch.empty(batch.size, heads, dtype=torch.float32, device=q.device)
    query, cache = rows_of(q), kv_rows(kv)
    table, stride_table, from_host = batch.page_table, batch.page_table.stride(0), None
    fills, kinds, reading = used, used, Reading.of(places, used)
    marks: tuple[torch.Tensor | int, ...] = (used, 0, 0, used, 0, 1)
    if places is not None:
        table, fills, kinds = addresses(batch, ranking, kv, places)
        stride_table, from_host = table.shape[2], torch.empty_like(used)
        if places.shared_blocks is not None:
            strides, layers = places.places.stride()[:2], places.host.shape[2]
            marks = (places.places, *strides, places.shared_blocks.of, places.layer, layers)
    # a fill, not a copy from the host: a CUDA graph can capture it
    if not isinstance(threshold, torch.Tensor):
        threshold = torch.full((1,), threshold, dtype=torch.float32, device=q.device)
    previous = start = 0
    for number, end in enumerate(ends):
        _round[(n_items, splits)](
            query,
            cache,
            table,
            batch.seq_lens,
            *ranking,
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
            threshold,
            int(len(threshold) > 1),
            scale / LN2,
            stride_table,
            *reading,
            0 if places is None else places.layer * kv_heads,
            fills,
            kinds,
            kinds.shape[1],
            GROUP=group,
            BLOCK_M=block_m,
            D=head_dim,
            PAGE=batch.page_size,
            BLOCK=batch.block_size,
            BLOCK_N=tokens,
            SPLITS=splits,
            BITS=bits,
            PRECISION=code_precision(q.dtype, bits),
            MEAN=bound == "round",
            FIRST=number == 0,
            PLACED=places is not None,
            CELLS=places is not None and places.shared_blocks is not None,
            CONTEXTS=places is not None and places.contexts is not None,
            CONTEXT_N=min(tokens, CONTEXT_TILE, batch.page_size),
            PARTS=next_power_of_2(kinds.shape[1]),
            STAGES=2 if q.element_size() == 4 else 5,
            num_warps=4,
        )
        previous, start = start, end
    finish[(n_items, group)](
        out,
        weight,
        used,
        stopped,
        acc,
        states,
        batch.seq_lens,
        *ranking,
        table,
        stride_table,
        used if from_host is None else from_host,
        *marks,
        kv_heads,
        capacity,
        len(ends),
        states.stride(0),
        GROUP=group,
        BLOCK_M=block_m,
        D=head_dim,
        SPLITS=splits,
        PLACED=places is not None,
        CELLS=places is not None and places.shared_blocks is not None,
        num_warps=4,
    )
    return Progressive(out, used, weight, from_host)
