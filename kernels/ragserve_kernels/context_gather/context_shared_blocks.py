# mypy: disable-error-code="no-untyped-def"
"""``context_shared_gather`` in Triton: programs loop over tiles of pages and read pinned memory directly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.context_gather.context_rows import context_pages, context_rows, store_context_rows
from ragserve_kernels.context_gather.gather_launch import GatherLaunch
from ragserve_kernels.context_gather.types import HostContexts
from ragserve_kernels.kv import KVLayers


@triton.jit(do_not_specialize=["n_entries", "n_layers"])
def context_shared_blocks_kernel(
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
    form,  # RowForm
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,  # tokens: whole pages, or a part of one
    DTYPE: tl.constexpr,
):
    o_token = tl.arange(0, TILE)
    n_lists = n_layers.to(tl.int64) * KV_HEADS
    n_moves = tl.minimum(tl.load(p_count), n_entries)
    n_items = (n_moves * PAGE + TILE - 1) // TILE
    p_host = context_pages(p_base, form, DTYPE)
    for i_item in tl.range(tl.program_id(0), n_items, tl.num_programs(0), num_stages=1):
        i_token = (i_item * TILE + o_token).to(tl.int64)
        i_move, i_within = i_token // PAGE, i_token % PAGE
        m_move = i_move < n_moves
        # [TILE] each
        i_source = tl.load(p_source + i_move, mask=m_move, other=0).to(tl.int64)
        i_target = tl.load(p_target + i_move, mask=m_move, other=0).to(tl.int64)
        p_token = p_tokens + (i_source // n_lists * PAGE + i_within) * 2
        rows = context_rows(p_host, p_turns, p_token, m_move, i_source % n_lists, n_lists, form, DTYPE)
        i_layer = i_target // KV_HEADS % n_layers
        o_dst = ((i_target // n_lists * PAGE + i_within) * KV_HEADS + i_target % KV_HEADS) * form.D
        p_k = tl.load(p_dst_k + i_layer, mask=m_move, other=0).to(tl.pointer_type(DTYPE)) + o_dst
        p_v = tl.load(p_dst_v + i_layer, mask=m_move, other=0).to(tl.pointer_type(DTYPE)) + o_dst
        p_k, p_v = tl.multiple_of(p_k, 16), tl.multiple_of(p_v, 16)
        store_context_rows(p_k, p_v, rows, m_move[:, None], form)


def context_shared_gather(
    contexts: HostContexts,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.context_gather.context_shared_gather`."""
    entries, page = source.shape[0], contexts.tokens.shape[1]
    launch = GatherLaunch.of(contexts.host, dst, contexts.turns, page, programs)
    context_shared_blocks_kernel[(min(launch.programs, triton.cdiv(entries * page, launch.tile)),)](
        contexts.base,
        dst.k_ptrs,
        dst.v_ptrs,
        contexts.tokens,
        contexts.turns,
        source,
        target,
        count,
        entries,
        dst.layers,
        launch.form,
        **launch.constants,
    )
