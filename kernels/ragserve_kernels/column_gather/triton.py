# mypy: disable-error-code="no-untyped-def"
"""``column_gather`` in Triton: programs loop over tiles of pages and read pinned memory directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import host_tile_bytes
from ragserve_kernels.kv import KVLayers

PROGRAMS = 3  # as `rotate_gather` from the host: saturate the link, and slow a decode step least
_TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["n_entries", "n_tiles", "n_items"])
def column_gather_kernel(
    p_host,  # [pages, 2, layers, KV_HEADS, PAGE, D]
    p_dst_k,  # int64 [layers]: addresses
    p_dst_v,
    p_source,  # int32 [layers, KV_HEADS, n_entries]
    p_target,
    n_layers,
    n_entries,
    n_tiles,  # per layer and head
    n_items,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,  # tokens: whole pages, or a part of one
    DTYPE: tl.constexpr,
):
    o_token = tl.arange(0, TILE)
    o_dim = tl.arange(0, D)
    for i_item in tl.range(tl.program_id(0), n_items, tl.num_programs(0), num_stages=1):
        i_list = (i_item // n_tiles).to(tl.int64)  # layer * KV_HEADS + head
        i_layer, i_head = i_list // KV_HEADS, i_list % KV_HEADS
        i_token = (i_item % n_tiles) * TILE + o_token
        i_entry = i_token // PAGE
        m_entry = i_entry < n_entries
        i_page = tl.load(p_source + i_list * n_entries + i_entry, mask=m_entry, other=-1).to(tl.int64)
        i_out = tl.load(p_target + i_list * n_entries + i_entry, mask=m_entry, other=0).to(tl.int64)
        m_row = (i_page >= 0)[:, None]
        i_page = tl.maximum(i_page, 0)
        # K and V of a head lie n_layers * KV_HEADS heads apart in a page
        o_head = (i_page * 2 * n_layers + i_layer) * KV_HEADS + i_head
        o_k = tl.multiple_of((o_head * PAGE + i_token % PAGE) * D, 16)
        o_v = tl.multiple_of(o_k + n_layers * KV_HEADS * PAGE * D, 16)
        # [TILE, D], both loads before their first use
        b_k = tl.load(p_host + o_k[:, None] + o_dim[None, :], mask=m_row)
        b_v = tl.load(p_host + o_v[:, None] + o_dim[None, :], mask=m_row)
        o_dst = tl.multiple_of(((i_out * PAGE + i_token % PAGE) * KV_HEADS + i_head) * D, 16)
        p_k = tl.multiple_of(tl.load(p_dst_k + i_layer).to(tl.pointer_type(DTYPE)), 16)
        p_v = tl.multiple_of(tl.load(p_dst_v + i_layer).to(tl.pointer_type(DTYPE)), 16)
        tl.store(p_k + o_dst[:, None] + o_dim[None, :], b_k, mask=m_row)
        tl.store(p_v + o_dst[:, None] + o_dim[None, :], b_v, mask=m_row)


def column_gather(
    host: torch.Tensor,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.column_gather.column_gather`."""
    programs = programs or PROGRAMS
    layers, kv_heads, head_dim, dtype = dst.layout
    page, entries = host.shape[4], source.shape[2]
    row_bytes = 2 * head_dim * dtype.itemsize
    tile = max(1, host_tile_bytes(programs) // row_bytes)  # a power of two
    tiles = triton.cdiv(entries * page, tile)
    items = layers * kv_heads * tiles
    column_gather_kernel[(min(programs, items),)](
        host,
        dst.k_ptrs,
        dst.v_ptrs,
        source,
        target,
        layers,
        entries,
        tiles,
        items,
        KV_HEADS=kv_heads,
        PAGE=page,
        D=head_dim,
        TILE=tile,
        DTYPE=_TL_DTYPE[dtype],
        num_warps=max(4, min(16, tile * row_bytes // 4096)),
    )
