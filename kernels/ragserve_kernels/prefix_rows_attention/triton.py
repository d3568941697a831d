# mypy: disable-error-code="no-untyped-def"
"""``prefix_rows_attention`` in Triton: flash attention over gathered slots, with the bound of each row
instead of a mask tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import at_head
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.dot import dot_precision
from ragserve_kernels.flash_tile import fold_tile
from ragserve_kernels.kv import rows_of

_SMS = 132  # of the H200
_WAVES = 4
_MAX_SPLITS = 32


class RowTile(NamedTuple):
    rows: int  # of the score tile: query rows x query heads of one group
    keys: int
    warps: int
    stages: int


@triton.jit
def attend_keys(
    state,  # of `fold_tile`
    b_q,  # [M, D]
    k,  # HeadRows of one KV head
    v,
    p_slots,
    n_len,  # int32 [M]
    i_begin,
    i_end,
    scale_2,
    HEAD_DIM: tl.constexpr,
    B_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold slots ``i_begin`` to ``i_end`` into the running softmax; without ``MASKED`` every row attends to
    all of them.
    """
    o_key = tl.arange(0, B_KEYS)
    for i_first in tl.range(i_begin, i_end, B_KEYS):
        i_key = i_first + o_key
        m_key = i_key < i_end
        if MASKED:
            i_slot = tl.load(p_slots + i_key, mask=m_key, other=0).to(tl.int64)
        else:
            i_slot = tl.load(p_slots + i_key).to(tl.int64)
        state = fold_tile(
            state, b_q, k, v, i_slot, i_key, m_key, n_len - 1, scale_2, HEAD_DIM, MASKED, PRECISION
        )
    return state


# one compilation for any number of them, wherever their lists begin (those of a layer lie behind the ones of
# the layers before): requests wait for it
@triton.jit(
    do_not_specialize=["n_rows", "n_splits"],
    do_not_specialize_on_alignment=["p_lse", "p_slots", "p_slot_start", "p_row_start", "p_row_len"],
)
def prefix_rows_attention_kernel(
    q,  # HeadRows of [R, Hq, D]
    k,  # HeadRows of [slots, Hkv, D]
    v,
    p_out,  # [R, Hq, D], contiguous; of partial results float32 [SPLITS, R, Hq, D]
    p_lse,  # float32 [R, Hq], contiguous; of partial results [SPLITS, R, Hq], in base 2
    p_slots,
    p_slot_start,
    p_row_start,
    p_row_len,
    n_rows,  # R
    n_splits,
    scale_2,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    i_kv_head = tl.program_id(0) // n_splits
    i_split = tl.program_id(0) % n_splits
    i_request = tl.program_id(1)
    i_row_first = tl.load(p_row_start + i_request).to(tl.int64)
    i_row_last = tl.load(p_row_start + i_request + 1).to(tl.int64)
    # the last rows see the most slots: start them first
    i_tile = tl.cdiv((i_row_last - i_row_first).to(tl.int32), B_ROWS) - 1 - tl.program_id(2)
    if i_tile < 0:
        return
    o_m = tl.arange(0, B_ROWS * B_GROUP)
    i_row = i_row_first + i_tile * B_ROWS + o_m // B_GROUP
    o_head = o_m % B_GROUP
    i_head = i_kv_head * GROUP + o_head
    m_q = (i_row < i_row_last) & (o_head < GROUP)
    n_len = tl.load(p_row_len + i_row, mask=m_q, other=0)
    n_most = tl.max(n_len, 0)
    n_least = tl.min(tl.where(m_q, n_len, 2147483647), 0)
    i_begin, i_end = 0, n_most
    if SPLIT:  # whole tiles of keys, as many for each
        n_share = tl.cdiv(tl.cdiv(n_most, B_KEYS), n_splits) * B_KEYS
        i_begin = tl.minimum(i_split * n_share, n_most)
        i_end = tl.minimum(i_begin + n_share, n_most)
    i_masked = tl.minimum(tl.maximum(n_least // B_KEYS * B_KEYS, i_begin), i_end)

    o_dim = tl.arange(0, HEAD_DIM)
    p_slots += tl.load(p_slot_start + i_request).to(tl.int64)
    k = at_head(k, i_kv_head.to(tl.int64))
    v = at_head(v, i_kv_head.to(tl.int64))
    # [M, D], M = rows x group
    b_q = tl.load(
        q.p + i_row[:, None] * q.stride + i_head[:, None] * q.stride_head + o_dim[None, :],
        mask=m_q[:, None],
        other=0.0,
    )
    b_acc = tl.zeros([B_ROWS * B_GROUP, HEAD_DIM], tl.float32)
    b_max = tl.full([B_ROWS * B_GROUP], -float("inf"), tl.float32)
    b_sum = tl.zeros([B_ROWS * B_GROUP], tl.float32)
    state = (b_acc, b_max, b_sum)
    state = attend_keys(
        state, b_q, k, v, p_slots, n_len, i_begin, i_masked, scale_2, HEAD_DIM, B_KEYS, False, PRECISION
    )
    state = attend_keys(
        state, b_q, k, v, p_slots, n_len, i_masked, i_end, scale_2, HEAD_DIM, B_KEYS, True, PRECISION
    )
    b_acc, b_max, b_sum = state
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_head_of_row = (i_split.to(tl.int64) * n_rows + i_row) * QUERY_HEADS + i_head
    tl.store(
        p_out + o_head_of_row[:, None] * HEAD_DIM + o_dim[None, :],
        b_out.to(p_out.dtype.element_ty),
        mask=m_q[:, None],
    )
    if WRITE_LSE or SPLIT:
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), -float("inf"))
        tl.store(p_lse + o_head_of_row, b_lse * (1.0 if SPLIT else 0.6931471805599453), mask=m_q)


@triton.jit(
    do_not_specialize=["n_splits", "n_requests", "n_heads_of_rows"],
    do_not_specialize_on_alignment=["p_lse", "p_row_start"],
)
def combine_splits_kernel(
    p_part,  # float32 [SPLITS, R, Hq, D]
    p_part_lse,  # float32 [SPLITS, R, Hq], base 2
    p_out,  # [R, Hq, D], contiguous
    p_lse,  # float32 [R, Hq], contiguous
    p_row_start,
    n_splits,
    n_requests,
    n_heads_of_rows,  # R x Hq
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_SPLITS: tl.constexpr,  # the most splits there are, a power of two
    WRITE_LSE: tl.constexpr,
):
    """Add up the parts of a row's query head, each weighted by its share of the softmax."""
    i = tl.program_id(0).to(tl.int64)
    if i // QUERY_HEADS >= tl.load(p_row_start + n_requests):  # padding
        return
    o_split = tl.arange(0, B_SPLITS)
    o_dim = tl.arange(0, HEAD_DIM)
    b_part_lse = tl.load(
        p_part_lse + o_split * n_heads_of_rows + i, mask=o_split < n_splits, other=-float("inf")
    )
    b_max = tl.max(b_part_lse, 0)
    b_weight = tl.exp2(b_part_lse - tl.where(b_max == -float("inf"), 0.0, b_max))
    b_sum = tl.sum(b_weight, 0)
    # [SPLITS, D]; a part without keys is zero
    b_part = tl.load(
        p_part + (o_split * n_heads_of_rows + i)[:, None] * HEAD_DIM + o_dim[None, :],
        mask=(o_split < n_splits)[:, None],
        other=0.0,
    )
    b_out = tl.sum(b_part * b_weight[:, None], 0) / tl.where(b_sum > 0, b_sum, 1.0)
    tl.store(p_out + i * HEAD_DIM + o_dim, b_out.to(p_out.dtype.element_ty))
    if WRITE_LSE:
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), -float("inf"))
        tl.store(p_lse + i, b_lse * 0.6931471805599453)


def choose_splits(programs: int, key_tiles: int) -> int:
    """Choose how many parts the keys are split into: with fewer programs than SMs, so that each SM gets at
    least ``_WAVES``.

    The last rows see all keys and the first ones few: the longest program decides, and the others wait for
    it. With a program for each SM the parts and adding them up cost more than that (README.md).
    ``key_tiles``: how many tiles the keys can be at most."""
    if programs >= _SMS:
        return 1
    return max(1, min(_MAX_SPLITS, key_tiles, -(-_WAVES * _SMS // programs)))


def choose_tile(head_dim: int, group: int, dtype: torch.dtype, programs: int) -> RowTile:
    """The fastest tiles measured on the H200 (README.md); ``programs``: how many a score tile of 128 rows
    would make.

    With less than two waves of them the latency of each counts, and two warpgroups share a tile. float32 runs
    without tensor cores and needs small tiles."""
    least = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return RowTile(least, 32, 4, 1)
    if head_dim == 256:
        return RowTile(max(least, 64), 32, 4, 2)
    return (
        RowTile(max(least, 128), 128, 8, 3)
        if programs < 2 * _SMS and head_dim <= 128
        else RowTile(max(least, 128), 64, 4, 3)
    )


def rows_of_every_launch(kv_heads: int, group: int) -> tuple[int, ...]:
    """Numbers of rows of one request whose launches, over keys enough to be split, take every tile, and parts
    as well as whole keys: no other number needs another compilation."""
    tiles = 1, -(-_SMS // kv_heads), -(-2 * _SMS // kv_heads)
    return tuple(each * 128 // next_power_of_2(group) for each in tiles)


def prefix_rows_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    slot_start: torch.Tensor,
    row_start: torch.Tensor,
    row_len: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    max_rows: int,
    scale: float,
    splits: int | None = None,
) -> None:
    """Launch the kernels; ``splits``: of the keys, to test others than those chosen here."""
    rows, query_heads, head_dim = q.shape
    kv_heads, requests = k.shape[1], slot_start.shape[0]
    group = query_heads // kv_heads
    block_group = next_power_of_2(group)
    # a captured graph has more requests and rows in one than will be there: all of them together are never
    # more than ``rows``
    tiles = min(
        requests * triton.cdiv(max_rows * block_group, 128),
        triton.cdiv(rows * block_group, 128) + requests - 1,
    )
    programs = kv_heads * tiles
    tile = choose_tile(head_dim, group, q.dtype, programs)
    splits = choose_splits(programs, triton.cdiv(slots.shape[0], tile.keys)) if splits is None else splits
    block_rows = max(1, tile.rows // block_group)
    part, part_lse = out, lse
    if splits > 1:
        part = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=q.device)
    prefix_rows_attention_kernel[(kv_heads * splits, requests, triton.cdiv(max_rows, block_rows))](
        rows_of(q),
        rows_of(k),
        rows_of(v),
        part,
        part if part_lse is None else part_lse,
        slots,
        slot_start,
        row_start,
        row_len,
        rows,
        splits,
        scale * 1.4426950408889634,
        QUERY_HEADS=query_heads,
        GROUP=group,
        B_GROUP=block_group,
        HEAD_DIM=head_dim,
        B_ROWS=block_rows,
        B_KEYS=tile.keys,
        PRECISION=dot_precision(q.dtype),
        WRITE_LSE=lse is not None,
        SPLIT=splits > 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        combine_splits_kernel[(rows * query_heads,)](
            part,
            part_lse,
            out,
            out if lse is None else lse,
            row_start,
            splits,
            requests,
            rows * query_heads,
            QUERY_HEADS=query_heads,
            HEAD_DIM=head_dim,
            B_SPLITS=_MAX_SPLITS,
            WRITE_LSE=lse is not None,
            num_warps=4,
        )
