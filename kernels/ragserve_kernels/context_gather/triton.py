# mypy: disable-error-code="no-untyped-def"
"""``context_gather`` in Triton: programs loop over lists, and tiles of their pages, and read pinned memory
directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.context_gather.context_rows import context_rows, store_context_rows
from ragserve_kernels.context_gather.gather_launch import GatherLaunch
from ragserve_kernels.context_gather.types import HostCodes
from ragserve_kernels.kv import KVLayers

_STEP = 64


@triton.jit(do_not_specialize=["n_lists", "n_entries", "n_layers", "i_first_layer"])
def context_gather_kernel(
    p_host,  # [pages, 2, n_layers, KV_HEADS, BLOCK, D], and PAIR bytes more a row with CODES
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
    form,  # RowForm
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,  # tokens: whole pages, or a part of one
    STEP: tl.constexpr,  # entries that are looked through at a time
    DTYPE: tl.constexpr,
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
            rows = context_rows(p_host, p_turns, p_token, m_page, i_from, n_heads, form, DTYPE)
            o_dst = tl.multiple_of(((i_out * PAGE + i_token % PAGE) * KV_HEADS + i_head) * form.D, 16)
            store_context_rows(p_k + o_dst, p_v + o_dst, rows, m_page[:, None], form)


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
    launch = GatherLaunch.of(host, dst, turns, tokens.shape[1], programs)
    if isinstance(host, HostCodes):
        pool, there = host.pool.view(-1).view(torch.int8), host.layers
    else:
        pool, there = host, host.shape[2]
    lists = dst.layers * dst.kv_heads
    context_gather_kernel[(min(launch.programs, lists),)](
        pool,
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
        launch.form,
        STEP=_STEP,
        **launch.constants,
    )
