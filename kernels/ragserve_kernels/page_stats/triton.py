# mypy: disable-error-code="no-untyped-def"
"""The kernel of ``page_stats``: a program per (page, layer, KV head) reads the page's keys once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats.types import PageStats


@triton.jit
def _stats(
    p_keys,  # int64 [layers]: addresses
    p_pages,  # int32 [n]
    p_low,  # [layers, n_pages * PER, kv_heads, D]
    p_high,
    p_center,  # [layers, n_pages, kv_heads, D]
    kv_heads,
    n_pages,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    i_layer = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(2)
    i_page = tl.load(p_pages + tl.program_id(0)).to(tl.int64)
    if i_page >= 0:
        p_k = tl.multiple_of(tl.load(p_keys + i_layer).to(tl.pointer_type(DTYPE)), 16)
        i_slot = i_page * PAGE + tl.arange(0, PAGE)
        o_dim = tl.arange(0, D)
        # [PAGE, D]
        b_k = tl.load(p_k + (i_slot * kv_heads + i_head)[:, None] * D + o_dim[None, :]).to(tl.float32)
        b_runs = tl.reshape(b_k, (PER, PAGE // PER, D))
        b_low = tl.min(b_runs, 1)  # [PER, D]
        b_high = tl.max(b_runs, 1)
        i_row = (i_layer * n_pages + i_page) * PER + tl.arange(0, PER)
        o_row = (i_row * kv_heads + i_head)[:, None] * D + o_dim[None, :]
        tl.store(p_low + o_row, b_low.to(DTYPE))
        tl.store(p_high + o_row, b_high.to(DTYPE))
        b_center = (tl.min(b_low, 0) + tl.max(b_high, 0)) / 2
        tl.store(
            p_center + ((i_layer * n_pages + i_page) * kv_heads + i_head) * D + o_dim, b_center.to(DTYPE)
        )


def page_stats(kv: KVLayers, pages: torch.Tensor, into: PageStats, page_size: int) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.page_stats.page_stats`."""
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[kv.dtype]
    _stats[(len(pages), kv.layers, kv.kv_heads)](
        kv.k_ptrs,
        pages,
        into.k_min,
        into.k_max,
        into.k_center,
        kv.kv_heads,
        into.k_center.shape[1],
        D=kv.head_dim,
        PAGE=page_size,
        PER=into.per_page,
        DTYPE=dtype,
        num_warps=4,
    )
