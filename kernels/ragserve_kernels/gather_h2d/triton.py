# mypy: disable-error-code="no-untyped-def"
"""``gather_h2d`` in Triton: programs loop over tiles of blocks and read pinned memory directly, 16 bytes per
thread and access.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import host_tile_bytes, next_power_of_2

PROGRAMS = 4  # as fast as any number alone, and least in the way of what runs beside it


@triton.jit(do_not_specialize=["n_entries", "n_items"])
def gather_h2d_kernel(
    p_host_0,  # int64 words [host blocks * WORDS]
    p_host_1,
    p_out_0,
    p_out_1,
    p_index,  # [n]
    p_out_index,  # [n]
    n_entries,
    n_items,
    WORDS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    TWO: tl.constexpr,
):
    CHUNKS: tl.constexpr = (WORDS + TILE_WORDS - 1) // TILE_WORDS
    for i_item in tl.range(tl.program_id(0), n_items, tl.num_programs(0)):
        i_entry = (i_item // CHUNKS) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        i_block = tl.load(p_index + i_entry, mask=i_entry < n_entries, other=-1).to(tl.int64)
        i_out = tl.load(p_out_index + i_entry, mask=i_entry < n_entries, other=0).to(tl.int64)
        o_word = (i_item % CHUNKS) * TILE_WORDS + tl.arange(0, TILE_WORDS)
        m_word = (i_block >= 0)[:, None] & (o_word < WORDS)[None, :]
        # [TILE_BLOCKS, TILE_WORDS]
        o_host = i_block[:, None] * WORDS + o_word[None, :]
        o_out = i_out[:, None] * WORDS + o_word[None, :]
        b_0 = tl.load(p_host_0 + o_host, mask=m_word)
        if TWO:
            b_1 = tl.load(p_host_1 + o_host, mask=m_word)
            tl.store(p_out_1 + o_out, b_1, mask=m_word)
        tl.store(p_out_0 + o_out, b_0, mask=m_word)


def gather_h2d_triton(
    host: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    index: torch.Tensor,
    out_index: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    programs = programs or PROGRAMS
    words, two = host[0][0].nbytes // 8, len(host) == 2
    tile_bytes = host_tile_bytes(programs)
    tile = tile_bytes // 8 // len(host)
    tile_words = min(next_power_of_2(words), tile)
    tile_blocks = tile // tile_words
    entries = index.shape[0]
    items = triton.cdiv(entries, tile_blocks) * triton.cdiv(words, tile_words)
    views = [tensor.view(-1).view(torch.int64) for tensor in (*host, *out)]
    gather_h2d_kernel[(min(programs, items),)](
        views[0],
        views[1] if two else views[0],
        views[len(host)],
        views[-1],
        index,
        out_index,
        entries,
        items,
        WORDS=words,
        TILE_BLOCKS=tile_blocks,
        TILE_WORDS=tile_words,
        TWO=two,
        num_warps=max(4, min(16, tile_bytes // 4096)),
    )
