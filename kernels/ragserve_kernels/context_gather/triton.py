# mypy: disable-error-code="no-untyped-def"
"""``context_gather`` in Triton: programs loop over lists, and tiles of their pages, and read pinned memory
directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.context_gather.context_rows import context_rows, store_context_rows
from ragserve_kernels.context_gather.types import PAIR_BYTES, HostCodes
from ragserve_kernels.dispatch import host_tile_bytes, next_power_of_2
from ragserve_kernels.kv import KVLayers

_STEP = 64
PROGRAMS = 3  # as `column_gather`
CODE_PROGRAMS = 8  # as `rotate_gather` from codes
TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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
    o_token = tl.arange(0, TILE)
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
            b_1, b_2, b_rest, b_v = context_rows(
                p_host,
                p_pairs,
                p_turns,
                i_row,
                i_turn,
                m_page,
                i_from,
                n_heads,
                BLOCK,
                D,
                HALF,
                B_HALF,
                B_REST,
                DTYPE,
                CODES,
                PAIR,
            )
            o_dst = tl.multiple_of(((i_out * PAGE + i_token % PAGE) * KV_HEADS + i_head) * D, 16)
            m_row = m_page[:, None]
            store_context_rows(
                p_k + o_dst, p_v + o_dst, b_1, b_2, b_rest, b_v, m_row, D, HALF, B_HALF, B_REST
            )


def tile_of(programs: int, head_dim: int, dtype: torch.dtype, codes: bool) -> tuple[int, int]:
    """Return the tokens of a tile, a power of two, and its warps."""
    value_bytes = 2 * head_dim * dtype.itemsize
    row_bytes = 2 * head_dim if codes else value_bytes
    tile = max(1, min(host_tile_bytes(programs) // row_bytes, (64 << 10) // value_bytes))
    return tile, max(4, min(16, tile * value_bytes // 4096))


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
    tile, warps = tile_of(programs, head_dim, dtype, codes is not None)
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
        DTYPE=TL_DTYPE[dtype],
        CODES=codes is not None,
        PAIR=PAIR_BYTES,
        num_warps=warps,
    )
