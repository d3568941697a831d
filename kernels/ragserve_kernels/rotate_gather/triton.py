"""``rotate_gather`` in Triton: one launch for all layers, documents and runs; see README.md for the layout
and the roofline.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import host_tile_bytes, next_power_of_2
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.quantize_kv.pairs import scale_and_zero
from ragserve_kernels.rotate_gather.kv_sources import DeviceSource, HostSource

_TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# as fast as any number alone, and the most that slow a decode step beside it by less than 5 % (README.md)
HOST_PROGRAMS = 3
# from 8-bit codes, which take a program longer than the link: three would load half as fast (README.md)
HOST_CODE_PROGRAMS = 8


class Source(NamedTuple):
    """`HostSource` or `DeviceSource` as the kernel takes it."""

    p_k: Any  # device: int64 [L], addresses; host: the arena
    p_v: Any
    p_index: Any  # device: [doc tokens], slots; host: int64 [docs], capacity
    p_table: Any  # int64 [docs]: device: start; host: base
    p_k_pairs: Any  # int32: scales and zero points of an arena of codes
    p_v_pairs: Any


class Tile(NamedTuple):
    """The rows of a run, R = TILE_TOKENS * TILE_HEADS, as they come from the source."""

    b_1: Any  # [R, B_HALF], or all of K, [R, HEAD_DIM], if ``WHOLE``
    b_2: Any  # [R, B_HALF]
    b_rest: Any  # [R, B_REST], or scalar
    b_v: Any  # [R, HEAD_DIM]
    b_k_pair: Any  # int32 [R], or scalar
    b_v_pair: Any


class Place(NamedTuple):
    """Where a run goes."""

    i_doc: Any
    i_layer: Any
    i_target: Any
    o_token: Any  # [R]
    o_head: Any  # [R]
    m_row: Any  # [R]


@triton.jit
def load_run(
    i_item,
    n_items,
    p_moves,
    n_moves,
    source,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT_HALF: tl.constexpr,
    B_HALF: tl.constexpr,
    B_REST: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HOST: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the `Tile` of an item and its `Place`: all loads, and no use of what they bring."""
    HEAD_TILES: tl.constexpr = KV_HEADS // TILE_HEADS
    # rows of a tile: tokens slow, heads fast, as they lie in the pool
    o_row = tl.arange(0, TILE_TOKENS * TILE_HEADS)
    o_token = o_row // TILE_HEADS
    o_dim = tl.arange(0, HEAD_DIM)
    o_half = tl.arange(0, B_HALF)
    i_move = tl.minimum(i_item, n_items - 1) // HEAD_TILES
    o_head = (i_item % HEAD_TILES) * TILE_HEADS + o_row % TILE_HEADS
    i_layer = (i_move // n_moves).to(tl.int64)
    p_move = p_moves + i_move.to(tl.int64) * 4
    i_doc = tl.load(p_move)
    i_first = tl.load(p_move + 1)
    n_tokens = tl.load(p_move + 2)
    i_target = tl.load(p_move + 3)
    m_row = (o_token < n_tokens) & (i_doc >= 0) & (i_item < n_items)
    i_doc = tl.maximum(i_doc, 0).to(tl.int64)

    # rows of the source, in elements
    if HOST:
        n_capacity = tl.load(source.p_index + i_doc)
        i_base = tl.load(source.p_table + i_doc)
        i_row = (i_layer * KV_HEADS + o_head) * n_capacity + i_first + o_token
        o_src = i_base + i_row * HEAD_DIM
        p_k = tl.multiple_of(source.p_k, 16)
        p_v = tl.multiple_of(source.p_v, 16)
    else:
        i_slot = tl.load(
            source.p_index + tl.load(source.p_table + i_doc) + i_first + o_token, mask=m_row, other=0
        ).to(tl.int64)
        o_src = (i_slot * KV_HEADS + o_head) * HEAD_DIM
        p_k = tl.multiple_of(tl.load(source.p_k + i_layer).to(tl.pointer_type(DTYPE)), 16)
        p_v = tl.multiple_of(tl.load(source.p_v + i_layer).to(tl.pointer_type(DTYPE)), 16)
    o_src = tl.multiple_of(o_src, 16)
    m_k = m_row[:, None] & (o_half < ROT_HALF)[None, :]
    p_k = p_k + o_src[:, None]
    if WHOLE:
        # [R, HEAD_DIM]: half a row of codes is less than the link moves at once
        b_1 = tl.load(p_k + o_dim[None, :], mask=m_row[:, None], other=0)
        b_2 = 0
    else:
        # [R, B_HALF], twice
        b_1 = tl.load(p_k + o_half[None, :], mask=m_k, other=0)
        b_2 = tl.load(p_k + ROT_HALF + o_half[None, :], mask=m_k, other=0)
    # [R, HEAD_DIM]
    b_v = tl.load(p_v + o_src[:, None] + o_dim[None, :], mask=m_row[:, None], other=0)
    b_rest = 0
    if B_REST > 0:
        # [R, B_REST]
        o_rest = 2 * ROT_HALF + tl.arange(0, B_REST)
        b_rest = tl.load(p_k + o_rest[None, :], mask=m_row[:, None] & (o_rest < HEAD_DIM)[None, :], other=0)
    b_k_pair = 0
    b_v_pair = 0
    if CODES:
        # [R]
        b_k_pair = tl.load(source.p_k_pairs + i_base // 4 + i_row, mask=m_row, other=0)
        b_v_pair = tl.load(source.p_v_pairs + i_base // 4 + i_row, mask=m_row, other=0)
    tile = Tile(b_1, b_2, b_rest, b_v, b_k_pair, b_v_pair)
    return tile, Place(i_doc, i_layer, i_target, o_token, o_head, m_row)


@triton.jit
def values(b_codes, b_scale, b_zero):
    """Return the values of codes [R, D], float32."""
    return b_codes.to(tl.float32) * b_scale[:, None] + b_zero[:, None]


@triton.jit
def store_run(
    tile,
    place,
    p_slots,
    p_shift,
    b_freq,
    p_dst_k,
    p_dst_v,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT_HALF: tl.constexpr,
    B_HALF: tl.constexpr,
    B_REST: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rotate a run, and write it to its slots."""
    b_1, b_2, b_rest, b_v, b_k_pair, b_v_pair = tile
    i_doc, i_layer, i_target, o_token, o_head, m_row = place
    o_dim = tl.arange(0, HEAD_DIM)
    o_half = tl.arange(0, B_HALF)
    m_k = m_row[:, None] & (o_half < ROT_HALF)[None, :]
    i_dst = tl.load(p_slots + i_target + o_token, mask=m_row, other=0).to(tl.int64)
    o_dst = tl.multiple_of((i_dst * KV_HEADS + o_head) * HEAD_DIM, 16)
    q_k = tl.multiple_of(tl.load(p_dst_k + i_layer).to(tl.pointer_type(DTYPE)), 16) + o_dst[:, None]
    q_v = tl.multiple_of(tl.load(p_dst_v + i_layer).to(tl.pointer_type(DTYPE)), 16) + o_dst[:, None]

    # one angle per pair: all tokens of a document move by the same shift; only the fraction of a turn matters
    b_turn = tl.load(p_shift + i_doc).to(tl.float64) * b_freq
    b_angle = (b_turn - tl.floor(b_turn + 0.5)).to(tl.float32) * 6.283185307179586
    b_cos = tl.cos(b_angle)[None, :]
    b_sin = tl.sin(b_angle)[None, :]
    if WHOLE:
        b_1, b_2 = tl.split(tl.permute(tl.reshape(b_1, [b_1.shape[0], 2, HEAD_DIM // 2]), [0, 2, 1]))
    if CODES:
        b_scale, b_zero = scale_and_zero(b_k_pair)
        b_1 = values(b_1, b_scale, b_zero)
        b_2 = values(b_2, b_scale, b_zero)
        if B_REST > 0:
            b_rest = values(b_rest, b_scale, b_zero).to(DTYPE)
        b_scale, b_zero = scale_and_zero(b_v_pair)
        b_v = values(b_v, b_scale, b_zero).to(DTYPE)
    b_1 = b_1.to(tl.float32)
    b_2 = b_2.to(tl.float32)
    tl.store(q_k + o_half[None, :], (b_1 * b_cos - b_2 * b_sin).to(DTYPE), mask=m_k)
    tl.store(q_k + ROT_HALF + o_half[None, :], (b_2 * b_cos + b_1 * b_sin).to(DTYPE), mask=m_k)
    tl.store(q_v + o_dim[None, :], b_v, mask=m_row[:, None])
    if B_REST > 0:
        o_rest = 2 * ROT_HALF + tl.arange(0, B_REST)
        tl.store(q_k + o_rest[None, :], b_rest, mask=m_row[:, None] & (o_rest < HEAD_DIM)[None, :])


# one compilation for any number of runs: requests wait for it
@triton.jit(do_not_specialize=["n_moves", "n_items"])
def rotate_gather_kernel(
    p_moves,  # int32 [L, N, 4]
    p_slots,  # [S]
    p_shift,  # [docs]
    p_inv_freq,  # [ROT_HALF]
    p_dst_k,  # int64 [L]: addresses
    p_dst_v,
    source,  # Source
    n_moves,
    n_items,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT_HALF: tl.constexpr,
    B_HALF: tl.constexpr,  # ROT_HALF rounded up to a power of two
    B_REST: tl.constexpr,  # the dimensions that do not rotate, rounded up; 0: none
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HOST: tl.constexpr,
    CODES: tl.constexpr,  # the source holds 8-bit codes
    AT_ONCE: tl.constexpr,  # runs that are loaded before the first is used: 1 or 2
    DTYPE: tl.constexpr,
):
    WHOLE: tl.constexpr = CODES and 2 * ROT_HALF == HEAD_DIM
    o_half = tl.arange(0, B_HALF)
    # turns per position, in float64: float32 would lose the angle at large shifts
    b_freq = tl.load(p_inv_freq + o_half, mask=o_half < ROT_HALF, other=0.0).to(tl.float64) * tl.full(
        [1], 0.15915494309189535, tl.float64
    )
    for i_item in tl.range(tl.program_id(0) * AT_ONCE, n_items, tl.num_programs(0) * AT_ONCE, num_stages=1):
        tile, place = load_run(
            *(i_item, n_items, p_moves, n_moves, source),
            *(KV_HEADS, HEAD_DIM, ROT_HALF, B_HALF, B_REST, TILE_TOKENS, TILE_HEADS),
            *(HOST, CODES, WHOLE, DTYPE),
        )
        if AT_ONCE == 2:
            second, second_place = load_run(
                *(i_item + 1, n_items, p_moves, n_moves, source),
                *(KV_HEADS, HEAD_DIM, ROT_HALF, B_HALF, B_REST, TILE_TOKENS, TILE_HEADS),
                *(HOST, CODES, WHOLE, DTYPE),
            )
        store_run(
            *(tile, place, p_slots, p_shift, b_freq, p_dst_k, p_dst_v),
            *(KV_HEADS, HEAD_DIM, ROT_HALF, B_HALF, B_REST, CODES, WHOLE, DTYPE),
        )
        if AT_ONCE == 2:
            store_run(
                *(second, second_place, p_slots, p_shift, b_freq, p_dst_k, p_dst_v),
                *(KV_HEADS, HEAD_DIM, ROT_HALF, B_HALF, B_REST, CODES, WHOLE, DTYPE),
            )


def rotate_gather_triton(
    source: DeviceSource | HostSource,
    dst: KVLayers,
    moves: torch.Tensor,
    slots: torch.Tensor,
    shift: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    tile_tokens: int,
    programs: int | None = None,
) -> None:
    """Launch the kernel; ``tile_tokens``: the longest run, rounded up to a power of two."""
    host, codes = isinstance(source, HostSource), source.pairs is not None
    value_bytes = 2 * dst.head_dim * dst.k[0].element_size()
    row_bytes = 2 * dst.head_dim if codes else value_bytes
    heads, head_dim = dst.kv_heads, dst.head_dim
    rotary_half = inv_freq.shape[0]
    rest = head_dim - 2 * rotary_half
    from_host = HOST_CODE_PROGRAMS if codes else HOST_PROGRAMS
    # rows (tokens x heads) that a program holds at once; fewer than tile_tokens count as that
    tile_rows = (host_tile_bytes(programs or from_host) if host else 16 << 10) // row_bytes
    tile_heads = 1
    while heads % (tile_heads * 2) == 0 and tile_tokens * tile_heads * 2 <= tile_rows:
        tile_heads *= 2
    # tiles of codes are small where a model has few heads: two cover the link's latency like one of values
    at_once = 2 if codes and 2 * tile_tokens * tile_heads <= tile_rows else 1
    items = moves.shape[0] * moves.shape[1] * (heads // tile_heads)
    if programs is None:
        programs = from_host if host else items
    rotate_gather_kernel[(min(programs, triton.cdiv(items, at_once)),)](
        moves,
        slots,
        shift,
        inv_freq,
        dst.k_ptrs,
        dst.v_ptrs,
        Source(*source.arguments, *(source.pairs or source.arguments[2:])),
        moves.shape[1],
        items,
        KV_HEADS=heads,
        HEAD_DIM=head_dim,
        ROT_HALF=rotary_half,
        B_HALF=next_power_of_2(rotary_half),
        B_REST=next_power_of_2(rest) if rest else 0,
        TILE_TOKENS=tile_tokens,
        TILE_HEADS=tile_heads,
        HOST=host,
        CODES=codes,
        AT_ONCE=at_once,
        DTYPE=_TL_DTYPE[dst.dtype],
        num_warps=max(4, min(16, tile_tokens * tile_heads * value_bytes // 4096)),
    )
