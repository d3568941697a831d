# mypy: disable-error-code="no-untyped-def"
"""``shared_gather`` in Triton: programs loop over tiles of pages and read pinned memory directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import host_tile_bytes
from ragserve_kernels.kv import KVLayers

PROGRAMS = 3  # as `resident_gather`
_TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["n_entries"])
def shared_gather_kernel(
    p_host,  # [pages, 2, layers, KV_HEADS, PAGE, D]
    p_dst_k,  # int64 [layers]: addresses
    p_dst_v,
    p_source,  # int32 [n_entries]
    p_target,
    p_count,  # int32 [1]
    n_entries,
    n_layers,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,  # tokens: whole pages, or a part of one
    DTYPE: tl.constexpr,
):
    o_token = tl.arange(0, TILE)
    o_dim = tl.arange(0, D)
    n_lists = n_layers * KV_HEADS
    n_moves = tl.minimum(tl.load(p_count), n_entries)
    n_items = (n_moves * PAGE + TILE - 1) // TILE
    for i_item in tl.range(tl.program_id(0), n_items, tl.num_programs(0), num_stages=1):
        i_token = (i_item * TILE + o_token).to(tl.int64)
        i_move, i_within = i_token // PAGE, i_token % PAGE
        m_move = i_move < n_moves
        # [TILE] each
        i_source = tl.load(p_source + i_move, mask=m_move, other=0).to(tl.int64)
        i_target = tl.load(p_target + i_move, mask=m_move, other=0).to(tl.int64)
        # K and V of a head lie n_lists heads apart in a page
        o_head = i_source // n_lists * 2 * n_lists + i_source % n_lists
        o_k = tl.multiple_of((o_head * PAGE + i_within) * D, 16)
        o_v = tl.multiple_of(o_k + n_lists * PAGE * D, 16)
        m_row = m_move[:, None]
        # [TILE, D], both loads before their first use
        b_k = tl.load(p_host + o_k[:, None] + o_dim[None, :], mask=m_row)
        b_v = tl.load(p_host + o_v[:, None] + o_dim[None, :], mask=m_row)
        i_layer = i_target // KV_HEADS % n_layers
        o_dst = ((i_target // n_lists * PAGE + i_within) * KV_HEADS + i_target % KV_HEADS) * D
        p_k = tl.load(p_dst_k + i_layer, mask=m_move, other=0).to(tl.pointer_type(DTYPE)) + o_dst
        p_v = tl.load(p_dst_v + i_layer, mask=m_move, other=0).to(tl.pointer_type(DTYPE)) + o_dst
        p_k, p_v = tl.multiple_of(p_k, 16), tl.multiple_of(p_v, 16)
        tl.store(p_k[:, None] + o_dim[None, :], b_k, mask=m_row)
        tl.store(p_v[:, None] + o_dim[None, :], b_v, mask=m_row)


def shared_gather(
    host: torch.Tensor,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.shared_gather.shared_gather`."""
    programs = programs or PROGRAMS
    layers, kv_heads, head_dim, dtype = dst.layout
    page, entries = host.shape[4], source.shape[0]
    row_bytes = 2 * head_dim * dtype.itemsize
    tile = max(1, host_tile_bytes(programs) // row_bytes)  # a power of two
    shared_gather_kernel[(min(programs, triton.cdiv(entries * page, tile)),)](
        host,
        dst.k_ptrs,
        dst.v_ptrs,
        source,
        target,
        count,
        entries,
        layers,
        KV_HEADS=kv_heads,
        PAGE=page,
        D=head_dim,
        TILE=tile,
        DTYPE=_TL_DTYPE[dtype],
        num_warps=max(4, min(16, tile * row_bytes // 4096)),
    )
