# mypy: disable-error-code="no-untyped-def"
"""``context_gather`` in Triton: programs loop over lists, and tiles of their pages, and read pinned memory
directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.context_gather.types import PAIR_BYTES, HostCodes
from ragserve_kernels.dispatch import host_tile_bytes, next_power_of_2
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.quantize_kv.pairs import scale_and_zero

_STEP = 64
PROGRAMS = 3  # as `column_gather`
CODE_PROGRAMS = 8  # as `rotate_gather` from codes
_TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["n_lists", "n_entries", "n_layers", "i_first_layer"])
def context_gather_kernel(
    p_host,  # [pages, 2, n_layers, KV_HEADS, BLOCK, D], and PAIR bytes more a row with CODES
    p_pairs,  # int32: the same memory in words; read with CODES
    p_dst_k,  # int64 [layers]: addresses
    p_dst_v,
    p_tokens,  # int32 [context pages, PAGE, 2]
    p_turns,  # float32 [n, 2, HALF]
    p_source,  # int32 [n_lists, n_entries]
    p_target,
    n_lists,  # layers * KV_HEADS, those of dst
    n_entries,
    n_layers,  # of the host's pages
    i_first_layer,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    B_HALF: tl.constexpr,  # HALF rounded up to a power of two
    B_REST: tl.constexpr,  # the dimensions that do not rotate, rounded up; 0: none
    TILE: tl.constexpr,  # tokens: whole pages, or a part of one
    STEP: tl.constexpr,  # entries that are looked through at a time
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,  # the pages hold 8-bit codes
    PAIR: tl.constexpr,  # bytes of a row's scale and zero point
):
    # half a row of codes is less than the link moves at once
    WHOLE: tl.constexpr = CODES and 2 * HALF == D
    o_token = tl.arange(0, TILE)
    o_dim = tl.arange(0, D)
    o_half = tl.arange(0, B_HALF)
    o_entry = tl.arange(0, STEP)
    n_heads = n_layers.to(tl.int64) * KV_HEADS  # of K, or V, of a page
    for i_number in tl.range(tl.program_id(0), n_lists, tl.num_programs(0), num_stages=1):
        i_list = i_number % n_lists.to(tl.int64)  # in int64
        i_layer, i_head = i_list // KV_HEADS, i_list % KV_HEADS
        o_list = i_list * n_entries
        # most lists are short: what is behind the last entry takes no time
        n_used = 0
        for i_first in range(0, n_entries, STEP):
            o_e = i_first + o_entry
            b_page = tl.load(p_source + o_list + o_e, mask=o_e < n_entries, other=-1)
            n_used = tl.maximum(n_used, tl.max(tl.where(b_page >= 0, o_e + 1, 0)))
        p_k = tl.multiple_of(tl.load(p_dst_k + i_layer).to(tl.pointer_type(DTYPE)), 16)
        p_v = tl.multiple_of(tl.load(p_dst_v + i_layer).to(tl.pointer_type(DTYPE)), 16)
        i_from = (i_first_layer + i_layer) * KV_HEADS + i_head
        for i_first in tl.range(0, n_used * PAGE, TILE, num_stages=1):
            i_token = i_first + o_token
            i_entry = i_token // PAGE
            m_entry = i_entry < n_used
            # [TILE] each
            i_page = tl.load(p_source + o_list + i_entry, mask=m_entry, other=-1).to(tl.int64)
            i_out = tl.load(p_target + o_list + i_entry, mask=m_entry, other=0).to(tl.int64)
            m_page = i_page >= 0
            p_token = p_tokens + (tl.maximum(i_page, 0) * PAGE + i_token % PAGE) * 2
            i_row = tl.load(p_token, mask=m_page, other=0).to(tl.int64)
            i_turn = tl.load(p_token + 1, mask=m_page, other=0).to(tl.int64)
            # rows of K and V of a head lie n_heads heads apart in a page
            n_row = n_heads * BLOCK
            i_block = i_row // BLOCK
            i_place = i_from * BLOCK + i_row % BLOCK
            if CODES:
                o_page = i_block * 2 * n_row * (D + PAIR)
                o_pair = o_page // 4 + 2 * n_row * D // 4 + i_place
            else:
                o_page = i_block * 2 * n_row * D
            o_k = tl.multiple_of(o_page + i_place * D, 16)
            o_v = tl.multiple_of(o_k + n_row * D, 16)
            m_row = m_page[:, None]
            m_half = m_row & (o_half < HALF)[None, :]
            # [TILE, B_HALF], twice, or [TILE, D], and [TILE, D]: all loads before their first use
            if WHOLE:
                b_k = tl.load(p_host + o_k[:, None] + o_dim[None, :], mask=m_row)
            else:
                b_1 = tl.load(p_host + o_k[:, None] + o_half[None, :], mask=m_half)
                b_2 = tl.load(p_host + o_k[:, None] + HALF + o_half[None, :], mask=m_half)
            if CODES:
                # [TILE] each
                b_k_pair = tl.load(p_pairs + o_pair, mask=m_page, other=0)
                b_v_pair = tl.load(p_pairs + o_pair + n_row, mask=m_page, other=0)
            b_v = tl.load(p_host + o_v[:, None] + o_dim[None, :], mask=m_row)
            p_turn = p_turns + i_turn[:, None] * (2 * HALF) + o_half[None, :]
            b_cos = tl.load(p_turn, mask=m_half, other=1.0)
            b_sin = tl.load(p_turn + HALF, mask=m_half, other=0.0)
            o_dst = tl.multiple_of(((i_out * PAGE + i_token % PAGE) * KV_HEADS + i_head) * D, 16)
            if B_REST > 0:
                # [TILE, B_REST]
                o_rest = 2 * HALF + tl.arange(0, B_REST)
                m_rest = m_row & (o_rest < D)[None, :]
                b_rest = tl.load(p_host + o_k[:, None] + o_rest[None, :], mask=m_rest)
                if CODES:
                    b_scale, b_zero = scale_and_zero(b_k_pair)
                    b_rest = (b_rest.to(tl.float32) * b_scale[:, None] + b_zero[:, None]).to(DTYPE)
                tl.store(p_k + o_dst[:, None] + o_rest[None, :], b_rest, mask=m_rest)
            if WHOLE:
                b_1, b_2 = tl.split(tl.permute(tl.reshape(b_k, [TILE, 2, D // 2]), [0, 2, 1]))
            b_1 = b_1.to(tl.float32)
            b_2 = b_2.to(tl.float32)
            if CODES:
                b_scale, b_zero = scale_and_zero(b_k_pair)
                b_1 = b_1 * b_scale[:, None] + b_zero[:, None]
                b_2 = b_2 * b_scale[:, None] + b_zero[:, None]
                b_scale, b_zero = scale_and_zero(b_v_pair)
                b_v = (b_v.to(tl.float32) * b_scale[:, None] + b_zero[:, None]).to(DTYPE)
            q_k = p_k + o_dst[:, None] + o_half[None, :]
            tl.store(q_k, (b_1 * b_cos - b_2 * b_sin).to(DTYPE), mask=m_half)
            tl.store(q_k + HALF, (b_2 * b_cos + b_1 * b_sin).to(DTYPE), mask=m_half)
            tl.store(p_v + o_dst[:, None] + o_dim[None, :], b_v, mask=m_row)


def context_gather(
    host: torch.Tensor | HostCodes,
    dst: KVLayers,
    tokens: torch.Tensor,
    turns: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    first_layer: int = 0,
    programs: int | None = None,
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.context_gather.context_gather`."""
    codes = host if isinstance(host, HostCodes) else None
    programs = programs or (PROGRAMS if codes is None else CODE_PROGRAMS)
    layers, kv_heads, head_dim, dtype = dst.layout
    half = turns.shape[2]
    rest = head_dim - 2 * half
    value_bytes = 2 * head_dim * dtype.itemsize
    row_bytes = value_bytes if codes is None else 2 * head_dim
    tile = max(1, min(host_tile_bytes(programs) // row_bytes, (64 << 10) // value_bytes))  # a power of two
    if isinstance(host, HostCodes):
        pool, pairs = host.pool.view(-1).view(torch.int8), host.pool.view(-1).view(torch.int32)
        there, block = host.layers, host.block
    else:
        pool, pairs, there, block = host, host, host.shape[2], host.shape[4]
    lists = layers * kv_heads
    context_gather_kernel[(min(programs, lists),)](
        pool,
        pairs,
        dst.k_ptrs,
        dst.v_ptrs,
        tokens,
        turns,
        source,
        target,
        lists,
        source.shape[2],
        there,
        first_layer,
        KV_HEADS=kv_heads,
        BLOCK=block,
        PAGE=tokens.shape[1],
        D=head_dim,
        HALF=half,
        B_HALF=next_power_of_2(half),
        B_REST=next_power_of_2(rest) if rest else 0,
        TILE=tile,
        STEP=_STEP,
        DTYPE=_TL_DTYPE[dtype],
        CODES=codes is not None,
        PAIR=PAIR_BYTES,
        num_warps=max(4, min(16, tile * value_bytes // 4096)),
    )
