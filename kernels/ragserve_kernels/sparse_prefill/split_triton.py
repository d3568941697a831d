# mypy: disable-error-code="no-untyped-def"
"""``split_lists`` in Triton: one launch, a program per query block and query head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.sparse_prefill.types import BlockLists, PrefillBatch, SplitLists

_ENTRIES = 256  # that a program copies at once


@triton.jit(do_not_specialize=["n_width"])
def split_lists_kernel(
    p_places,  # int32 [T, 2], T query blocks of a request
    p_index,
    p_start,  # int32 [T, LIST_HEADS]
    p_count,
    p_full_count,  # int32 [HEADS, T]
    p_full,  # int32 [HEADS, T, n_width]
    p_masked_count,
    p_masked,  # int32 [HEADS, T, MOST_MASKED]
    n_width,
    HEADS: tl.constexpr,
    LIST_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOST_MASKED: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_head = tl.program_id(1)
    o_list = i_block * LIST_HEADS + i_head // (HEADS // LIST_HEADS)
    p_index += tl.load(p_start + o_list).to(tl.int64)
    n_listed = tl.load(p_count + o_list)
    i_first = tl.load(p_places + i_block * 2 + 1) * BLOCK_Q // BLOCK_K
    # ascending: those to mask are the last ones
    o_last = tl.arange(0, MOST_MASKED)
    i_last = tl.load(p_index + n_listed - 1 - o_last, mask=o_last < n_listed, other=-1)
    n_masked = tl.sum((i_last >= i_first).to(tl.int32), 0)
    n_full = n_listed - n_masked

    o_out = i_head * tl.num_programs(0) + i_block
    tl.store(p_full_count + o_out, n_full)
    tl.store(p_masked_count + o_out, n_masked)
    tl.store(p_masked + o_out * MOST_MASKED + n_masked - 1 - o_last, i_last, mask=o_last < n_masked)
    p_full += o_out.to(tl.int64) * n_width
    for i_entry in tl.range(0, n_full, ENTRIES):
        o_entry = i_entry + tl.arange(0, ENTRIES)
        entry = tl.load(p_index + o_entry, mask=o_entry < n_full)
        tl.store(p_full + o_entry, entry, mask=o_entry < n_full)


def split_lists_triton(batch: PrefillBatch, places: torch.Tensor, own: BlockLists, split: SplitLists) -> None:
    """Write the lists ``own`` of a request's query blocks, at ``places``, to ``split``."""
    heads, blocks, width = split.full.shape
    split_lists_kernel[(blocks, heads)](
        places,
        *own,
        *split,
        width,
        HEADS=heads,
        LIST_HEADS=own.starts.shape[1],
        BLOCK_Q=batch.block_q,
        BLOCK_K=batch.block_k,
        MOST_MASKED=batch.most_masked,
        ENTRIES=_ENTRIES,
        num_warps=2,
    )
