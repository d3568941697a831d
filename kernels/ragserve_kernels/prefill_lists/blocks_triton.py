# mypy: disable-error-code="no-untyped-def"
"""``list_blocks`` in Triton: means of blocks, and from a row of scores to a list without a sort.

Launches depend on no length but by their grids, so that prompts of any length run the same kernels."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import at_head
from ragserve_kernels.kv import rows_of
from ragserve_kernels.prefill_lists.last_taken import BY_SHARE, BY_WEIGHT, WHOLE, ordered
from ragserve_kernels.sparse_prefill import BlockLists, PrefillBatch, lists_at

_CHUNK = 512  # key blocks at once


# the pages of a batch's second request begin where the first's end
@triton.jit(
    do_not_specialize=["i_block_first", "i_begin", "n_end", "i_row_first", "n_blocks"],
    do_not_specialize_on_alignment=["p_pages"],
)
def block_means_kernel(
    x,  # HeadRows of [rows, heads, D]
    p_out,  # float32 [heads / GROUP, blocks * GROUP, D], contiguous
    p_pages,  # int32 [pages] of the request; with PAGE 0 rows follow each other from i_row_first on
    i_block_first,  # of position 0's blocks
    i_begin,  # positions that have a row
    n_end,
    i_row_first,
    n_blocks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    i_position = (i_block_first + i_block) * BLOCK + tl.arange(0, BLOCK)
    m_row = (i_position >= i_begin) & (i_position < n_end)
    # [N]
    if PAGE == 0:
        i_row = (i_row_first + i_position - i_begin).to(tl.int64)
    else:
        i_row = tl.load(p_pages + i_position // PAGE, mask=m_row, other=0).to(tl.int64) * PAGE
        i_row += i_position % PAGE
    x = at_head(x, i_head.to(tl.int64))
    o_dim = tl.arange(0, HEAD_DIM)
    # [N, D]
    b_x = tl.load(x.p + i_row[:, None] * x.stride + o_dim[None, :], mask=m_row[:, None], other=0.0)
    n_rows = tl.minimum((i_block_first + i_block + 1) * BLOCK, n_end)
    n_rows -= tl.maximum((i_block_first + i_block) * BLOCK, i_begin)
    o_out = (i_head // GROUP * n_blocks + i_block).to(tl.int64) * GROUP + i_head % GROUP
    tl.store(p_out + o_out * HEAD_DIM + o_dim, tl.sum(b_x.to(tl.float32), 0) / n_rows)


@triton.jit
def _worth(p_scores, o_block, n_reach, i_last, n_forced, i_forced, scale, log_block, log_last):
    """Return scores [N], and keys [N] of the same order: the greatest for what is forced, 0 beyond."""
    m_block = o_block < n_reach
    b_score = tl.load(p_scores + o_block, mask=m_block, other=float("-inf"))
    b_score = b_score * scale + tl.where(o_block == i_last, log_last, log_block)
    m_forced = m_block & ((o_block < n_forced) | (o_block >= i_forced))
    b_key = tl.where(m_forced, tl.full(o_block.shape, 0xFFFFFFFF, tl.uint32), ordered(b_score))
    return b_score, tl.where(m_block, b_key, tl.zeros(o_block.shape, tl.uint32))


@triton.jit(
    do_not_specialize=["n_blocks", "n_queries", "n_len", "sink", "local"],
    do_not_specialize_on_alignment=["p_places", "p_start", "p_count"],
)
def list_blocks_kernel(
    p_scores,  # float32 [Hkv, T * GROUP, KB], contiguous
    p_places,  # int32 [T, 2], T query blocks of the request
    p_streams,  # bool [Hkv]: heads that list what is forced and no more
    p_index,
    p_start,  # int32 [T, Hq], contiguous
    p_count,
    n_blocks,  # KB
    n_queries,  # T
    n_len,
    sink,
    local,
    part,  # of the reach with BY_SHARE, of the weight with BY_WEIGHT
    scale,
    log_block,  # of the tokens of a key block
    log_last,  # of those of the last one
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BY: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_query = tl.program_id(1)
    i_number = tl.load(p_places + i_query * 2 + 1)
    n_reach = (tl.minimum((i_number + 1) * BLOCK_Q, n_len) + BLOCK_K - 1) // BLOCK_K
    i_forced = i_number * BLOCK_Q // BLOCK_K - local
    i_row = (i_head // GROUP * n_queries + i_query).to(tl.int64) * GROUP + i_head % GROUP
    p_scores += i_row * n_blocks
    is_streaming = tl.load(p_streams + i_head // GROUP).to(tl.int1)
    o_list = i_query * tl.num_programs(0) + i_head
    p_index += tl.load(p_start + o_list).to(tl.int64)
    o_step = tl.arange(0, CHUNK)
    i_last = n_blocks - 1

    b_cut = tl.full([], 0, tl.uint32)  # the key of the last block that is taken
    f_wanted = n_reach.to(tl.float32)
    f_max = 0.0
    f_above = 0.0  # held by the blocks above the cut
    f_same = 1.0  # held by each at the cut
    if BY == BY_SHARE:
        f_wanted = tl.ceil(n_reach.to(tl.float32) * part)
    if BY == BY_WEIGHT:
        b_max = tl.full([CHUNK], -float("inf"), tl.float32)
        for i_start in range(0, n_reach, CHUNK):
            # fmt: off
            b_score, b_key = _worth(
                p_scores, i_start + o_step, n_reach, i_last, sink, i_forced, scale, log_block, log_last
            )
            # fmt: on
            b_max = tl.maximum(b_max, tl.where(b_key > 0, b_score, -float("inf")))
        f_max = tl.max(b_max, 0)
        b_total = tl.zeros([CHUNK], tl.float32)
        for i_start in range(0, n_reach, CHUNK):
            # fmt: off
            b_score, b_key = _worth(
                p_scores, i_start + o_step, n_reach, i_last, sink, i_forced, scale, log_block, log_last
            )
            # fmt: on
            b_total += tl.where(b_key > 0, tl.exp(b_score - f_max), 0.0)
        f_wanted = tl.sum(b_total, 0) * part
    f_wanted = tl.where(is_streaming, 0.0, f_wanted)  # then the cut lies above every score
    if BY != WHOLE:
        b_bit = tl.full([], 0x80000000, tl.uint32)
        for _ in range(32):
            b_next = b_cut | b_bit
            b_held = tl.zeros([CHUNK], tl.float32)
            for i_start in range(0, n_reach, CHUNK):
                # fmt: off
                b_score, b_key = _worth(
                    p_scores, i_start + o_step, n_reach, i_last, sink, i_forced, scale, log_block, log_last
                )
                # fmt: on
                b_worth = tl.exp(b_score - f_max) if BY == BY_WEIGHT else tl.full([CHUNK], 1.0, tl.float32)
                b_held += tl.where(b_key >= b_next, b_worth, 0.0)
            b_cut = tl.where(tl.sum(b_held, 0) >= f_wanted, b_next, b_cut)
            b_bit = b_bit >> 1
        b_held = tl.zeros([CHUNK], tl.float32)
        b_same = tl.zeros([CHUNK], tl.float32)
        for i_start in range(0, n_reach, CHUNK):
            # fmt: off
            b_score, b_key = _worth(
                p_scores, i_start + o_step, n_reach, i_last, sink, i_forced, scale, log_block, log_last
            )
            # fmt: on
            b_worth = tl.exp(b_score - f_max) if BY == BY_WEIGHT else tl.full([CHUNK], 1.0, tl.float32)
            b_held += tl.where(b_key > b_cut, b_worth, 0.0)
            b_same = tl.maximum(b_same, tl.where(b_key == b_cut, b_worth, 0.0))
        f_above = tl.sum(b_held, 0)
        f_same = tl.max(b_same, 0)

    n_listed = 0
    n_equal = 0
    for i_start in range(0, n_reach, CHUNK):
        o_block = i_start + o_step
        # fmt: off
        b_score, b_key = _worth(
            p_scores, o_block, n_reach, i_last, sink, i_forced, scale, log_block, log_last
        )
        # fmt: on
        m_same = (o_block < n_reach) & (b_key == b_cut)
        b_before = n_equal + tl.cumsum(m_same.to(tl.int32), 0) - m_same.to(tl.int32)
        m_keep = b_key > b_cut
        m_keep = m_keep | (m_same & (f_above + b_before.to(tl.float32) * f_same < f_wanted))
        m_keep = m_keep | (b_key == 0xFFFFFFFF)
        if BY == WHOLE:
            m_keep = (o_block < n_reach) & (~is_streaming | (b_key == 0xFFFFFFFF))
        b_place = n_listed + tl.cumsum(m_keep.to(tl.int32), 0) - 1
        tl.store(p_index + b_place, o_block, mask=m_keep)
        n_listed += tl.sum(m_keep.to(tl.int32), 0)
        n_equal += tl.sum(m_same.to(tl.int32), 0)
    tl.store(p_count + o_list, n_listed)


def list_blocks_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    lists: BlockLists,
    alpha: float,
    share: float | None,
    sink: int,
    local: int,
    streaming: torch.Tensor | None,
    scale: float,
) -> None:
    """Launch the kernels; see :func:`ragserve_kernels.prefill_lists.list_blocks`."""
    if streaming is None:
        streaming = torch.zeros(k.shape[1], dtype=torch.bool, device=k.device)
    row = 0
    for request, span in enumerate(batch.spans()):
        new, prefix = batch.new[request], batch.prefix[request]
        if not new:
            continue
        length, pages = prefix + new, batch.page_table[request]
        blocks = -(-length // batch.block_k)
        means = _means(k, pages, 0, 0, length, 0, blocks, 1, batch.page_size, batch.block_k)
        group, first = q.shape[1] // k.shape[1], prefix // batch.block_q
        queries = _means(q, pages, first, prefix, length, row, len(span), group, 0, batch.block_q)
        scores = torch.bmm(queries, means.transpose(1, 2))
        own = slice(span.start, span.stop)
        write_best(
            scores, batch, request, own, lists_at(lists, own), alpha, share, sink, local, streaming, scale
        )
        row += new


def write_best(
    scores: torch.Tensor,
    batch: PrefillBatch,
    request: int,
    own: slice,
    lists: BlockLists,
    alpha: float,
    share: float | None,
    sink: int,
    local: int,
    streaming: torch.Tensor,
    scale: float,
) -> None:
    """Write lists of the best blocks of a request's query blocks ``own``.

    ``scores``: float32 ``[kv_heads, query blocks * group, key blocks]``, before ``scale``. ``streaming``:
    bool ``[kv_heads]``."""
    length = batch.prefix[request] + batch.new[request]
    queries, heads = lists.starts.shape
    blocks = scores.shape[2]
    by = BY_SHARE if share is not None else WHOLE if alpha == 1 else BY_WEIGHT
    list_blocks_kernel[(heads, queries)](
        scores,
        batch.places[own],
        streaming,
        lists.blocks,
        lists.starts,
        lists.counts,
        blocks,
        queries,
        length,
        sink,
        local,
        float(share) if share is not None else alpha * (1 - 1e-6),
        scale,
        math.log(batch.block_k),
        math.log(length - (blocks - 1) * batch.block_k),
        GROUP=heads // scores.shape[0],
        BLOCK_Q=batch.block_q,
        BLOCK_K=batch.block_k,
        CHUNK=_CHUNK,
        BY=by.value,
        num_warps=2,
    )


def _means(
    rows: torch.Tensor,
    pages: torch.Tensor,
    first: int,
    begin: int,
    end: int,
    row: int,
    blocks: int,
    group: int,
    page: int,
    size: int,
) -> torch.Tensor:
    """Return the means of the rows of positions ``begin`` to ``end`` by block, from block ``first`` on:
    float32 ``[heads / group, blocks * group, head_dim]``."""
    heads, dim = rows.shape[1:]
    out = torch.empty(heads // group, blocks * group, dim, dtype=torch.float32, device=rows.device)
    block_means_kernel[(heads, blocks)](
        rows_of(rows),
        out,
        pages,
        first,
        begin,
        end,
        row,
        blocks,
        GROUP=group,
        HEAD_DIM=dim,
        PAGE=page,
        BLOCK=size,
        num_warps=4,
    )
    return out
