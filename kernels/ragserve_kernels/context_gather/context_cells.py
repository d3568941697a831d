# mypy: disable-error-code="no-untyped-def"
"""``context_cell_gather`` in Triton: programs loop over tiles of pages and read pinned memory directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.context_gather.context_rows import context_rows, store_context_rows
from ragserve_kernels.context_gather.triton import CODE_PROGRAMS, PROGRAMS, TL_DTYPE, tile_of
from ragserve_kernels.context_gather.types import PAIR_BYTES, HostCodes, HostContexts
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.kv import KVLayers


@triton.jit(do_not_specialize=["n_entries", "n_layers"])
def context_cells_kernel(
    p_base,  # int64 [1]: address of the documents' pages
    p_dst_k,  # int64 [layers]: addresses
    p_dst_v,
    p_tokens,  # int32 [numbers, PAGE, 2]
    p_turns,  # float32 [n, 2, HALF]
    p_source,  # int32 [n_entries]
    p_target,
    p_count,  # int32 [1]
    n_entries,
    n_layers,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    B_HALF: tl.constexpr,
    B_REST: tl.constexpr,
    TILE: tl.constexpr,  # tokens: whole pages, or a part of one
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,
    PAIR: tl.constexpr,
):
    o_token = tl.arange(0, TILE)
    n_lists = n_layers.to(tl.int64) * KV_HEADS
    n_moves = tl.minimum(tl.load(p_count), n_entries)
    n_items = (n_moves * PAGE + TILE - 1) // TILE
    a_host = tl.load(p_base)
    p_host = tl.multiple_of(a_host.to(tl.pointer_type(tl.int8 if CODES else DTYPE)), 16)
    p_pairs = a_host.to(tl.pointer_type(tl.int32))
    for i_item in tl.range(tl.program_id(0), n_items, tl.num_programs(0), num_stages=1):
        i_token = (i_item * TILE + o_token).to(tl.int64)
        i_move, i_within = i_token // PAGE, i_token % PAGE
        m_move = i_move < n_moves
        # [TILE] each
        i_source = tl.load(p_source + i_move, mask=m_move, other=0).to(tl.int64)
        i_target = tl.load(p_target + i_move, mask=m_move, other=0).to(tl.int64)
        p_token = p_tokens + (i_source // n_lists * PAGE + i_within) * 2
        i_row = tl.load(p_token, mask=m_move, other=0).to(tl.int64)
        i_turn = tl.load(p_token + 1, mask=m_move, other=0).to(tl.int64)
        b_1, b_2, b_rest, b_v = context_rows(
            p_host,
            p_pairs,
            p_turns,
            i_row,
            i_turn,
            m_move,
            i_source % n_lists,
            n_lists,
            BLOCK,
            D,
            HALF,
            B_HALF,
            B_REST,
            DTYPE,
            CODES,
            PAIR,
        )
        i_layer = i_target // KV_HEADS % n_layers
        o_dst = ((i_target // n_lists * PAGE + i_within) * KV_HEADS + i_target % KV_HEADS) * D
        p_k = tl.load(p_dst_k + i_layer, mask=m_move, other=0).to(tl.pointer_type(DTYPE)) + o_dst
        p_v = tl.load(p_dst_v + i_layer, mask=m_move, other=0).to(tl.pointer_type(DTYPE)) + o_dst
        p_k, p_v = tl.multiple_of(p_k, 16), tl.multiple_of(p_v, 16)
        store_context_rows(p_k, p_v, b_1, b_2, b_rest, b_v, m_move[:, None], D, HALF, B_HALF, B_REST)


def context_cell_gather(
    contexts: HostContexts,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.context_gather.context_cell_gather`."""
    codes = isinstance(contexts.host, HostCodes)
    programs = programs or (CODE_PROGRAMS if codes else PROGRAMS)
    layers, kv_heads, head_dim, dtype = dst.layout
    page, entries, half = contexts.tokens.shape[1], source.shape[0], contexts.turns.shape[2]
    rest = head_dim - 2 * half
    tile, warps = tile_of(programs, head_dim, dtype, codes)
    context_cells_kernel[(min(programs, triton.cdiv(entries * page, tile)),)](
        contexts.base,
        dst.k_ptrs,
        dst.v_ptrs,
        contexts.tokens,
        contexts.turns,
        source,
        target,
        count,
        entries,
        layers,
        KV_HEADS=kv_heads,
        BLOCK=contexts.sizes[2],
        PAGE=page,
        D=head_dim,
        HALF=half,
        B_HALF=next_power_of_2(half),
        B_REST=next_power_of_2(rest) if rest else 0,
        TILE=tile,
        DTYPE=TL_DTYPE[dtype],
        CODES=codes,
        PAIR=PAIR_BYTES,
        num_warps=warps,
    )
