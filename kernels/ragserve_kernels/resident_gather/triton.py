# mypy: disable-error-code="no-untyped-def"
"""``resident_gather`` in Triton: programs loop over lists, and tiles of their pages, and read pinned memory
directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import host_tile_bytes
from ragserve_kernels.kv import KVLayers

_STEP = 64
PROGRAMS = 3  # as `rotate_gather` from the host: saturate the link, and slow a decode step least
_TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["n_lists", "n_entries"])
def resident_gather_kernel(
    p_host,  # [pages, 2, layers, KV_HEADS, PAGE, D]
    p_dst_k,  # int64 [layers]: addresses
    p_dst_v,
    p_source,  # int32 [n_lists, n_entries]
    p_target,
    n_lists,  # layers * KV_HEADS
    n_entries,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,  # tokens: whole pages, or a part of one
    STEP: tl.constexpr,  # entries that are looked through at a time
    DTYPE: tl.constexpr,
):
    o_token = tl.arange(0, TILE)
    o_dim = tl.arange(0, D)
    o_entry = tl.arange(0, STEP)
    for i_number in tl.range(tl.program_id(0), n_lists, tl.num_programs(0), num_stages=1):
        i_list = i_number % n_lists.to(tl.int64)  # in int64
        i_layer, i_head = i_list // KV_HEADS, i_list % KV_HEADS
        p_list = i_list * n_entries
        # most lists are short: what is behind the last entry takes no time
        n_used = 0
        for i_first in range(0, n_entries, STEP):
            o_e = i_first + o_entry
            b_page = tl.load(p_source + p_list + o_e, mask=o_e < n_entries, other=-1)
            n_used = tl.maximum(n_used, tl.max(tl.where(b_page >= 0, o_e + 1, 0)))
        p_k = tl.multiple_of(tl.load(p_dst_k + i_layer).to(tl.pointer_type(DTYPE)), 16)
        p_v = tl.multiple_of(tl.load(p_dst_v + i_layer).to(tl.pointer_type(DTYPE)), 16)
        for i_first in tl.range(0, n_used * PAGE, TILE, num_stages=1):
            i_token = i_first + o_token
            i_entry = i_token // PAGE
            m_entry = i_entry < n_used
            i_page = tl.load(p_source + p_list + i_entry, mask=m_entry, other=-1).to(tl.int64)
            i_out = tl.load(p_target + p_list + i_entry, mask=m_entry, other=0).to(tl.int64)
            m_row = (i_page >= 0)[:, None]
            i_page = tl.maximum(i_page, 0)
            # K and V of a head lie n_lists heads apart in a page
            o_head = i_page * 2 * n_lists + i_list
            o_k = tl.multiple_of((o_head * PAGE + i_token % PAGE) * D, 16)
            o_v = tl.multiple_of(o_k + n_lists.to(tl.int64) * PAGE * D, 16)
            # [TILE, D], both loads before their first use
            b_k = tl.load(p_host + o_k[:, None] + o_dim[None, :], mask=m_row)
            b_v = tl.load(p_host + o_v[:, None] + o_dim[None, :], mask=m_row)
            o_dst = tl.multiple_of(((i_out * PAGE + i_token % PAGE) * KV_HEADS + i_head) * D, 16)
            tl.store(p_k + o_dst[:, None] + o_dim[None, :], b_k, mask=m_row)
            tl.store(p_v + o_dst[:, None] + o_dim[None, :], b_v, mask=m_row)


def resident_gather(
    host: torch.Tensor,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.resident_gather.resident_gather`."""
    programs = programs or PROGRAMS
    layers, kv_heads, head_dim, dtype = dst.layout
    page, entries = host.shape[4], source.shape[2]
    row_bytes = 2 * head_dim * dtype.itemsize
    tile = max(1, host_tile_bytes(programs) // row_bytes)  # a power of two
    lists = layers * kv_heads
    resident_gather_kernel[(min(programs, lists),)](
        host,
        dst.k_ptrs,
        dst.v_ptrs,
        source,
        target,
        lists,
        entries,
        KV_HEADS=kv_heads,
        PAGE=page,
        D=head_dim,
        TILE=tile,
        STEP=_STEP,
        DTYPE=_TL_DTYPE[dtype],
        num_warps=max(4, min(16, tile * row_bytes // 4096)),
    )
