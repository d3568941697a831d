# mypy: disable-error-code="no-untyped-def"
"""One program per (page, layer, KV head) reads the page's keys once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import KVLayers

if TYPE_CHECKING:
    from ragserve_kernels.page_stats.types import PageStats


@triton.jit
def _stats(
    k_ptrs,
    pages,
    low,
    high,
    center,
    kv_heads,
    n_pages,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    i_layer = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(2)
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    if page >= 0:
        keys = tl.multiple_of(tl.load(k_ptrs + i_layer).to(tl.pointer_type(DTYPE)), 16)
        slots = page * PAGE + tl.arange(0, PAGE)
        cols = tl.arange(0, D)
        # [PAGE, D]
        b_k = tl.load(keys + (slots * kv_heads + i_head)[:, None] * D + cols[None, :]).to(tl.float32)
        runs = tl.reshape(b_k, (PER, PAGE // PER, D))
        b_low = tl.min(runs, 1)  # [PER, D]
        b_high = tl.max(runs, 1)
        rows = (i_layer * n_pages + page) * PER + tl.arange(0, PER)
        o_row = (rows * kv_heads + i_head)[:, None] * D + cols[None, :]
        tl.store(low + o_row, b_low.to(DTYPE))
        tl.store(high + o_row, b_high.to(DTYPE))
        b_center = (tl.min(b_low, 0) + tl.max(b_high, 0)) / 2
        tl.store(center + ((i_layer * n_pages + page) * kv_heads + i_head) * D + cols, b_center.to(DTYPE))


def page_stats(kv: KVLayers, pages: torch.Tensor, into: PageStats, page_size: int) -> None:
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[kv.dtype]
    _stats[(len(pages), kv.layers, kv.kv_heads)](
        kv.k_ptrs,
        pages,
        into.k_min,
        into.k_max,
        into.k_center,
        kv.kv_heads,
        kv.slots // page_size,
        D=kv.head_dim,
        PAGE=page_size,
        PER=into.per_page,
        DTYPE=dtype,
        num_warps=4,
    )
