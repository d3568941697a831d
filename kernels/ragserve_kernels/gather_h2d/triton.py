"""``gather_h2d`` in Triton: programs loop over chunks of blocks and read pinned memory directly, 16 bytes per thread and access."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ragserve_kernels._common import next_power_of_2

PROGRAMS = 32


@triton.jit
def gather_h2d_kernel(
    p_host_0,  # int64 words [host blocks * WORDS]
    p_host_1,
    p_out_0,
    p_out_1,
    p_index,  # [n]
    p_out_index,  # [n]
    n_items,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    TWO: tl.constexpr,
    STAGES: tl.constexpr,
):
    CHUNKS: tl.constexpr = (WORDS + CHUNK - 1) // CHUNK
    for i_item in tl.range(tl.program_id(0), n_items, tl.num_programs(0), num_stages=STAGES):
        i_entry = i_item // CHUNKS
        i_block = tl.load(p_index + i_entry).to(tl.int64)
        i_out = tl.load(p_out_index + i_entry).to(tl.int64)
        o_word = (i_item % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
        m_word = (o_word < WORDS) & (i_block >= 0)
        b_0 = tl.load(p_host_0 + i_block * WORDS + o_word, mask=m_word)
        if TWO:
            b_1 = tl.load(p_host_1 + i_block * WORDS + o_word, mask=m_word)
            tl.store(p_out_1 + i_out * WORDS + o_word, b_1, mask=m_word)
        tl.store(p_out_0 + i_out * WORDS + o_word, b_0, mask=m_word)


def gather_h2d_triton(
    host: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    index: torch.Tensor,
    out_index: torch.Tensor,
    *,
    programs: int | None = None,
    chunk_bytes: int = 8192,
    num_warps: int = 4,
    stages: int = 1,
) -> None:
    words = host[0][0].nbytes // 8
    chunk = min(next_power_of_2(words), chunk_bytes // 8)
    items = index.shape[0] * triton.cdiv(words, chunk)
    views = [tensor.view(-1).view(torch.int64) for tensor in (*host, *out)]
    two = len(host) == 2
    gather_h2d_kernel[(min(programs or PROGRAMS, items),)](
        views[0],
        views[1] if two else views[0],
        views[len(host)],
        views[-1],
        index,
        out_index,
        items,
        WORDS=words,
        CHUNK=chunk,
        TWO=two,
        STAGES=stages,
        num_warps=num_warps,
    )
