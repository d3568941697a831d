"""``rotate_gather`` in Triton: one launch for all layers, documents and runs; see README.md for the layout
and the roofline.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import host_tile_bytes, next_power_of_2
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.rotate_gather.kv_sources import DeviceSource, HostSource

_TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# as fast as any number alone, and the most that slow a decode step beside it by less than 5 % (README.md)
HOST_PROGRAMS = 3


# one compilation for any number of runs: requests wait for it
@triton.jit(do_not_specialize=["n_moves", "n_items"])
def rotate_gather_kernel(
    p_moves,  # int32 [L, N, 4]
    p_slots,  # [S]
    p_shift,  # [docs]
    p_inv_freq,  # [ROT_HALF]
    p_dst_k,  # int64 [L]: addresses
    p_dst_v,
    p_src_k,  # device: int64 [L], addresses; host: the arena
    p_src_v,
    p_src_index,  # device: [doc tokens], slots; host: int64 [docs], capacity
    p_src_table,  # int64 [docs]: device: start; host: base
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
    DTYPE: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = KV_HEADS // TILE_HEADS
    # rows of a tile: tokens slow, heads fast, as they lie in the pool
    o_row = tl.arange(0, TILE_TOKENS * TILE_HEADS)
    o_token = o_row // TILE_HEADS
    o_dim = tl.arange(0, HEAD_DIM)
    o_half = tl.arange(0, B_HALF)
    m_half = o_half < ROT_HALF
    # turns per position, in float64: float32 would lose the angle at large shifts
    b_freq = tl.load(p_inv_freq + o_half, mask=m_half, other=0.0).to(tl.float64) * tl.full(
        [1], 0.15915494309189535, tl.float64
    )

    for i_item in tl.range(tl.program_id(0), n_items, tl.num_programs(0), num_stages=1):
        i_move = i_item // HEAD_TILES
        o_head = (i_item % HEAD_TILES) * TILE_HEADS + o_row % TILE_HEADS
        i_layer = (i_move // n_moves).to(tl.int64)
        p_move = p_moves + i_move.to(tl.int64) * 4
        i_doc = tl.load(p_move)
        i_first = tl.load(p_move + 1)
        n_tokens = tl.load(p_move + 2)
        i_target = tl.load(p_move + 3)
        m_row = (o_token < n_tokens) & (i_doc >= 0)
        i_doc = tl.maximum(i_doc, 0).to(tl.int64)

        # source and destination rows, in elements
        if HOST:
            n_capacity = tl.load(p_src_index + i_doc)
            o_src = (
                tl.load(p_src_table + i_doc)
                + ((i_layer * KV_HEADS + o_head) * n_capacity + i_first + o_token) * HEAD_DIM
            )
            p_k = tl.multiple_of(p_src_k, 16)
            p_v = tl.multiple_of(p_src_v, 16)
        else:
            i_slot = tl.load(
                p_src_index + tl.load(p_src_table + i_doc) + i_first + o_token, mask=m_row, other=0
            ).to(tl.int64)
            o_src = (i_slot * KV_HEADS + o_head) * HEAD_DIM
            p_k = tl.multiple_of(tl.load(p_src_k + i_layer).to(tl.pointer_type(DTYPE)), 16)
            p_v = tl.multiple_of(tl.load(p_src_v + i_layer).to(tl.pointer_type(DTYPE)), 16)
        o_src = tl.multiple_of(o_src, 16)
        m_k = m_row[:, None] & m_half[None, :]
        # [TILE_TOKENS * TILE_HEADS, B_HALF], twice, and [.., HEAD_DIM]: all loads before their first use
        b_1 = tl.load(p_k + o_src[:, None] + o_half[None, :], mask=m_k, other=0.0)
        b_2 = tl.load(p_k + o_src[:, None] + ROT_HALF + o_half[None, :], mask=m_k, other=0.0)
        b_v = tl.load(p_v + o_src[:, None] + o_dim[None, :], mask=m_row[:, None], other=0.0)

        i_dst = tl.load(p_slots + i_target + o_token, mask=m_row, other=0).to(tl.int64)
        o_dst = tl.multiple_of((i_dst * KV_HEADS + o_head) * HEAD_DIM, 16)
        q_k = tl.multiple_of(tl.load(p_dst_k + i_layer).to(tl.pointer_type(DTYPE)), 16)
        q_v = tl.multiple_of(tl.load(p_dst_v + i_layer).to(tl.pointer_type(DTYPE)), 16)

        # one angle per pair: all tokens of a document move by the same shift; only the fraction of a turn
        # matters
        b_turn = tl.load(p_shift + i_doc).to(tl.float64) * b_freq
        b_angle = (b_turn - tl.floor(b_turn + 0.5)).to(tl.float32) * 6.283185307179586
        b_cos = tl.cos(b_angle)[None, :]
        b_sin = tl.sin(b_angle)[None, :]
        b_1 = b_1.to(tl.float32)
        b_2 = b_2.to(tl.float32)
        tl.store(q_k + o_dst[:, None] + o_half[None, :], (b_1 * b_cos - b_2 * b_sin).to(DTYPE), mask=m_k)
        tl.store(
            q_k + o_dst[:, None] + ROT_HALF + o_half[None, :], (b_2 * b_cos + b_1 * b_sin).to(DTYPE), mask=m_k
        )
        tl.store(q_v + o_dst[:, None] + o_dim[None, :], b_v, mask=m_row[:, None])
        if B_REST > 0:
            o_rest = 2 * ROT_HALF + tl.arange(0, B_REST)
            m_rest = m_row[:, None] & (o_rest < HEAD_DIM)[None, :]
            b_rest = tl.load(p_k + o_src[:, None] + o_rest[None, :], mask=m_rest, other=0.0)
            tl.store(q_k + o_dst[:, None] + o_rest[None, :], b_rest, mask=m_rest)


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
    row_bytes = 2 * dst.head_dim * dst.k[0].element_size()
    host = isinstance(source, HostSource)
    heads, head_dim = dst.kv_heads, dst.head_dim
    rotary_half = inv_freq.shape[0]
    rest = head_dim - 2 * rotary_half
    # rows (tokens x heads) that a program holds at once; fewer than tile_tokens count as that
    tile_rows = (host_tile_bytes(programs or HOST_PROGRAMS) if host else 16 << 10) // row_bytes
    tile_heads = 1
    while heads % (tile_heads * 2) == 0 and tile_tokens * tile_heads * 2 <= tile_rows:
        tile_heads *= 2
    items = moves.shape[0] * moves.shape[1] * (heads // tile_heads)
    if programs is None:
        programs = HOST_PROGRAMS if host else items
    rotate_gather_kernel[(min(programs, items),)](
        moves,
        slots,
        shift,
        inv_freq,
        dst.k_ptrs,
        dst.v_ptrs,
        *source.arguments,
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
        DTYPE=_TL_DTYPE[dst.dtype],
        num_warps=max(4, min(16, tile_tokens * tile_heads * row_bytes // 4096)),
    )
