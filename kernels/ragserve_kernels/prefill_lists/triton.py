# mypy: disable-error-code="no-untyped-def"
"""``block_lse`` in Triton: scores of a tile of queries, reduced block by block; they never leave the chip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import at_head
from ragserve_kernels.dot import dot, dot_precision
from ragserve_kernels.kv import rows_of
from ragserve_kernels.sparse_prefill import PrefillBatch

_ROWS = 64  # queries of a program
_SPAN = 64  # key blocks of a program


# the pages of a batch's second request begin where the first's end
@triton.jit(
    do_not_specialize=["i_row_ahead", "n_queries", "n_blocks", "n_len"],
    do_not_specialize_on_alignment=["p_positions", "p_pages"],
)
def block_lse_kernel(
    q,  # HeadRows of [R, Hq, D]
    k,  # HeadRows of [slots, Hkv, D]
    p_out,  # float32 [Hq, N, KB], contiguous
    p_positions,  # int32 [N]
    p_pages,  # int32 [pages] of the request
    i_row_ahead,  # rows of q less positions
    n_queries,  # N
    n_blocks,  # KB
    n_len,
    scale_2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_head = tl.program_id(0)
    o_query = tl.program_id(1) * B_ROWS + tl.arange(0, B_ROWS)
    m_query = o_query < n_queries
    # [M]
    i_position = tl.load(p_positions + o_query, mask=m_query, other=-1)
    i_row = (i_position + i_row_ahead).to(tl.int64)
    n_seen = tl.max(i_position, 0) // BLOCK_K + 1  # blocks that a query of the tile sees
    o_dim = tl.arange(0, HEAD_DIM)
    # [M, D]
    b_q = tl.load(
        q.p + i_row[:, None] * q.stride + i_head * q.stride_head + o_dim[None, :],
        mask=m_query[:, None],
        other=0.0,
    )
    k = at_head(k, (i_head // GROUP).to(tl.int64))
    i_first = tl.program_id(2) * SPAN
    for i_block in tl.range(i_first, tl.minimum(i_first + SPAN, n_blocks)):
        b_lse = tl.full([B_ROWS], -float("inf"), tl.float32)
        if i_block < n_seen:
            i_key = i_block * BLOCK_K + tl.arange(0, BLOCK_K)
            m_key = i_key < n_len
            # [N]
            i_slot = tl.load(p_pages + i_key // PAGE, mask=m_key, other=0).to(tl.int64) * PAGE + i_key % PAGE
            # [D, N]
            b_k = tl.load(k.p + i_slot[None, :] * k.stride + o_dim[:, None], mask=m_key[None, :], other=0.0)
            b_s = dot(b_q, b_k, tl.zeros([B_ROWS, BLOCK_K], tl.float32), PRECISION) * scale_2
            b_s = tl.where(i_key[None, :] <= i_position[:, None], b_s, -float("inf"))
            b_max = tl.max(b_s, 1)
            b_base = tl.where(b_max == -float("inf"), 0.0, b_max)
            b_sum = tl.sum(tl.exp2(b_s - b_base[:, None]), 1)
            b_some = tl.where(b_sum > 0, b_sum, 1.0)
            b_lse = tl.where(b_sum > 0, (b_base + tl.log2(b_some)) * 0.6931471805599453, -float("inf"))
        o_out = (i_head.to(tl.int64) * n_queries + o_query) * n_blocks + i_block
        tl.store(p_out + o_out, b_lse, mask=m_query)


def block_lse_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    request: int,
    ahead: int,
    positions: torch.Tensor,
    length: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Launch the kernel; see :func:`ragserve_kernels.prefill_lists.block_lse`.

    ``ahead``: of a position, to its row of ``q``. The result is contiguous."""
    heads, n = q.shape[1], len(positions)
    blocks = -(-length // batch.block_k)
    out = torch.empty((heads, n, blocks), dtype=torch.float32, device=q.device)
    block_lse_kernel[(heads, triton.cdiv(n, _ROWS), triton.cdiv(blocks, _SPAN))](
        rows_of(q),
        rows_of(k),
        out,
        positions,
        batch.page_table[request],
        ahead,
        n,
        blocks,
        length,
        scale * 1.4426950408889634,
        GROUP=heads // k.shape[1],
        HEAD_DIM=q.shape[2],
        PAGE=batch.page_size,
        BLOCK_K=batch.block_k,
        B_ROWS=_ROWS,
        SPAN=_SPAN,
        PRECISION=dot_precision(q.dtype),
        num_warps=4,
        num_stages=3 if q.dtype != torch.float32 else 1,
    )
    return out
