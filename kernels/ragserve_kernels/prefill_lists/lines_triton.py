# mypy: disable-error-code="no-untyped-def"
"""``list_lines`` in Triton: from scores of sampled queries to lines, without a sort, and from those to lists.

Slash sums read a row backwards instead of adding to shared cells, so that they are the same in every run.
Launches depend on no length but by their grids. Shapes in comments: S segments, n sampled queries of each,
N = S * n, KB key blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.prefill_lists.last_taken import BY_SHARE, BY_WEIGHT, WHOLE
from ragserve_kernels.sparse_prefill import BlockLists

_CHUNK = 512  # key blocks at once
_QUERIES = 4  # sampled queries whose cells are looked at at once: a search reads them 33 times


@triton.jit(do_not_specialize=["n_blocks"])
def line_mass_kernel(
    p_lse,  # float32 [Hq, N, KB], contiguous; made shares of the attention, times the weight, in place
    p_positions,  # int32 [N]
    p_weight,  # float32 [N]
    n_blocks,  # KB
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_query = tl.program_id(0)
    i_head = tl.program_id(1)
    n_seen = tl.load(p_positions + i_query) // BLOCK_K + 1
    f_weight = tl.load(p_weight + i_query)
    p_lse += (i_head.to(tl.int64) * tl.num_programs(0) + i_query) * n_blocks
    o_step = tl.arange(0, CHUNK)
    b_max = tl.full([CHUNK], -float("inf"), tl.float32)
    for i_start in range(0, n_seen, CHUNK):
        o_block = i_start + o_step
        b_max = tl.maximum(b_max, tl.load(p_lse + o_block, mask=o_block < n_seen, other=-float("inf")))
    f_max = tl.max(b_max, 0)
    b_sum = tl.zeros([CHUNK], tl.float32)
    for i_start in range(0, n_seen, CHUNK):
        o_block = i_start + o_step
        b_lse = tl.load(p_lse + o_block, mask=o_block < n_seen, other=-float("inf"))
        b_sum += tl.exp(b_lse - f_max)
    f_lse = f_max + tl.log(tl.sum(b_sum, 0))
    for i_start in range(0, n_seen, CHUNK):
        o_block = i_start + o_step
        b_lse = tl.load(p_lse + o_block, mask=o_block < n_seen, other=-float("inf"))
        tl.store(p_lse + o_block, tl.exp(b_lse - f_lse) * f_weight, mask=o_block < n_seen)


@triton.jit(
    do_not_specialize=["n_blocks", "n_sampled"],
    do_not_specialize_on_alignment=["p_vertical", "p_slash"],
)
def line_keys_kernel(
    p_mass,  # float32 [Hq, N, KB]
    p_positions,  # int32 [N]
    p_vertical,  # float32 [S, KB]: lengths
    p_slash,
    p_given,  # uint8 [2, Hq, KB]
    p_keys,  # int32 [S, Hq, 2, KB]: uint32 keys in the order in which lines are taken, the greatest first
    n_blocks,  # KB
    n_sampled,  # n
    GIVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_segment = tl.program_id(1)
    i_kind = tl.program_id(2) % 2
    o_line = tl.program_id(2) // 2 * CHUNK + tl.arange(0, CHUNK)
    m_line = o_line < n_blocks
    i_query_first = i_segment * n_sampled
    n_queries = tl.num_programs(1) * n_sampled
    p_mass += (i_head.to(tl.int64) * n_queries + i_query_first) * n_blocks
    b_sum = tl.zeros([CHUNK], tl.float32)
    for i_query in range(n_sampled):
        i_own = tl.load(p_positions + i_query_first + i_query) // BLOCK_K
        i_block = tl.where(i_kind == 0, o_line, i_own - o_line)
        b_sum += tl.load(p_mass + i_query * n_blocks + i_block, mask=o_line <= i_own, other=0.0)
    p_length = tl.where(i_kind == 0, p_vertical, p_slash) + i_segment * n_blocks
    b_length = tl.load(p_length + o_line, mask=m_line, other=1.0)
    b_density = tl.div_rn(b_sum, tl.maximum(b_length, 1.0))
    b_key = b_density.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True)  # never negative
    if GIVEN:
        o_given = (i_kind * tl.num_programs(0) + i_head) * n_blocks + o_line
        m_given = tl.load(p_given + o_given, mask=m_line, other=0) > 0
        b_key = tl.where(m_given, b_key | 0x80000000, b_key)
    b_key = tl.where(o_line == 0, tl.full([CHUNK], 0xFFFFFFFF, tl.uint32), b_key)
    o_key = ((i_segment * tl.num_programs(0) + i_head) * 2 + i_kind).to(tl.int64) * n_blocks + o_line
    tl.store(p_keys + o_key, b_key.to(tl.int32, bitcast=True), mask=m_line)


@triton.jit
def _taken(p_keys, o_line, m_line, i_first, b_cut, i_cut):
    """Return which lines come before the cut or are at it, up to the ``i_cut``-th of all lines."""
    # [CHUNK]
    b_key = tl.load(p_keys + o_line, mask=m_line, other=0).to(tl.uint32, bitcast=True)
    return m_line & ((b_key > b_cut) | ((b_key == b_cut) & (i_first + o_line <= i_cut)))


@triton.jit
def _held(
    p_mass,
    p_positions,
    p_keys,
    p_vertical,
    p_slash,
    n_blocks,
    n_sampled,
    b_cut,
    i_cut,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
    BY: tl.constexpr,
):
    """Return the weight of the cells that taken lines cross, or with ``BY_SHARE`` these lines' lengths."""
    o_step = tl.arange(0, CHUNK)
    if BY == BY_SHARE:
        b_held = tl.zeros([CHUNK], tl.float32)
        for i_start in range(0, n_blocks, CHUNK):
            o_line = i_start + o_step
            m_line = o_line < n_blocks
            m_taken = _taken(p_keys, o_line, m_line, 0, b_cut, i_cut)
            b_held += tl.load(p_vertical + o_line, mask=m_taken, other=0.0)
            m_taken = _taken(p_keys + n_blocks, o_line, m_line, n_blocks, b_cut, i_cut)
            b_held += tl.load(p_slash + o_line, mask=m_taken, other=0.0)
        f_held = tl.sum(b_held, 0)
    else:
        b_cells = tl.zeros([QUERIES, CHUNK], tl.float32)
        for i_query in range(0, n_sampled, QUERIES):
            o_query = i_query + tl.arange(0, QUERIES)
            # [Q, 1]; queries behind the last one see no block
            b_own = tl.load(p_positions + o_query, mask=o_query < n_sampled, other=-BLOCK_K) // BLOCK_K
            i_end = tl.max(b_own, 0) + 1
            b_own = b_own[:, None]
            p_rows = p_mass + o_query[:, None] * n_blocks
            for i_start in range(0, i_end, CHUNK):
                o_line = (i_start + o_step)[None, :]
                m_seen = o_line <= b_own  # [Q, CHUNK]
                m_taken = _taken(p_keys, o_line, m_seen, 0, b_cut, i_cut)
                m_taken = m_taken | _taken(p_keys + n_blocks, b_own - o_line, m_seen, n_blocks, b_cut, i_cut)
                b_mass = tl.load(p_rows + o_line, mask=m_seen, other=0.0)
                b_cells += tl.where(m_taken, b_mass, 0.0)
        f_held = tl.sum(tl.sum(b_cells, 1), 0)
    return f_held


@triton.jit(
    do_not_specialize=["n_blocks", "n_sampled"],
    do_not_specialize_on_alignment=["p_vertical", "p_slash", "p_counts"],
)
def pick_lines_kernel(
    p_mass,
    p_positions,
    p_keys,
    p_vertical,
    p_slash,
    p_given,
    p_lines,  # uint8 [2, S, Hq, KB]
    p_counts,  # int64 [2]: lines of those given, and others; added to
    n_blocks,
    n_sampled,
    part,  # of the length with BY_SHARE, of the weight with BY_WEIGHT
    GIVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
    BY: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_segment = tl.program_id(1)
    n_heads = tl.num_programs(0)
    i_query_first = i_segment * n_sampled
    n_queries = tl.num_programs(1) * n_sampled
    p_mass += (i_head.to(tl.int64) * n_queries + i_query_first) * n_blocks
    p_positions += i_query_first
    p_keys += (i_segment * n_heads + i_head).to(tl.int64) * 2 * n_blocks
    p_vertical += i_segment * n_blocks
    p_slash += i_segment * n_blocks
    o_step = tl.arange(0, CHUNK)

    b_cut = tl.full([], 0, tl.uint32)  # the key of the last line that is taken
    i_cut = 2 * n_blocks  # the last line with that key that is: vertical ones, then slash ones
    if BY != WHOLE:
        if BY == BY_SHARE:
            b_length = tl.zeros([CHUNK], tl.float32)
            for i_start in range(0, n_blocks, CHUNK):
                o_line = i_start + o_step
                b_length += tl.load(p_vertical + o_line, mask=o_line < n_blocks, other=0.0)
            f_wanted = tl.sum(b_length, 0) * part
        else:
            # fmt: off
            f_wanted = part * _held(
                p_mass, p_positions, p_keys, p_vertical, p_slash, n_blocks, n_sampled, b_cut, i_cut,
                BLOCK_K, CHUNK, QUERIES, BY,
            )
            # fmt: on
        b_bit = tl.full([], 0x80000000, tl.uint32)
        for _ in range(32):
            b_next = b_cut | b_bit
            # fmt: off
            f_held = _held(
                p_mass, p_positions, p_keys, p_vertical, p_slash, n_blocks, n_sampled, b_next, i_cut,
                BLOCK_K, CHUNK, QUERIES, BY,
            )
            # fmt: on
            b_cut = tl.where(f_held >= f_wanted, b_next, b_cut)
            b_bit = b_bit >> 1
        b_same = tl.zeros([CHUNK], tl.int32)
        for i_start in range(0, 2 * n_blocks, CHUNK):
            o_line = i_start + o_step
            b_key = tl.load(p_keys + o_line, mask=o_line < 2 * n_blocks, other=0).to(tl.uint32, bitcast=True)
            b_same += ((o_line < 2 * n_blocks) & (b_key == b_cut)).to(tl.int32)
        if tl.sum(b_same, 0) > 1:
            i_short = -1  # up to here less is held than is wanted
            i_cut = 2 * n_blocks - 1
            while i_cut - i_short > 1:
                i_half = (i_cut + i_short) // 2
                # fmt: off
                f_held = _held(
                    p_mass, p_positions, p_keys, p_vertical, p_slash, n_blocks, n_sampled, b_cut, i_half,
                    BLOCK_K, CHUNK, QUERIES, BY,
                )
                # fmt: on
                i_short = tl.where(f_held >= f_wanted, i_short, i_half)
                i_cut = tl.where(f_held >= f_wanted, i_half, i_cut)

    n_reused = tl.full([], 0, tl.int32)
    n_taken = tl.full([], 0, tl.int32)
    for i_kind in range(2):
        o_out = ((i_kind * tl.num_programs(1) + i_segment) * n_heads + i_head).to(tl.int64) * n_blocks
        for i_start in range(0, n_blocks, CHUNK):
            o_line = i_start + o_step
            m_line = o_line < n_blocks
            m_taken = _taken(p_keys + i_kind * n_blocks, o_line, m_line, i_kind * n_blocks, b_cut, i_cut)
            m_taken = m_taken | (o_line == 0)
            tl.store(p_lines + o_out + o_line, m_taken.to(tl.uint8), mask=m_line)
            n_taken += tl.sum(m_taken.to(tl.int32), 0)
            if GIVEN:
                o_given = (i_kind * n_heads + i_head) * n_blocks + o_line
                m_given = tl.load(p_given + o_given, mask=m_line, other=0) > 0
                n_reused += tl.sum((m_taken & m_given).to(tl.int32), 0)
    tl.atomic_add(p_counts, n_reused.to(tl.int64))
    tl.atomic_add(p_counts + 1, (n_taken - n_reused).to(tl.int64))


@triton.jit(
    do_not_specialize=["n_blocks", "n_segments", "i_segment_first"],
    do_not_specialize_on_alignment=["p_places", "p_start", "p_count"],
)
def list_lines_kernel(
    p_lines,  # uint8 [2, S, Hq, KB]
    p_places,  # int32 [T, 2], T query blocks of the segments
    p_index,
    p_start,  # int32 [T, Hq], contiguous
    p_count,
    n_blocks,  # KB
    n_segments,  # S
    i_segment_first,
    SEGMENT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_query = tl.program_id(1)
    n_heads = tl.num_programs(0)
    RATIO: tl.constexpr = BLOCK_Q // BLOCK_K
    i_number = tl.load(p_places + i_query * 2 + 1)
    i_segment = i_number * BLOCK_Q // SEGMENT - i_segment_first
    p_vertical = p_lines + (i_segment * n_heads + i_head).to(tl.int64) * n_blocks
    p_slash = p_vertical + n_segments * n_heads * n_blocks
    i_own_first = i_number * RATIO
    n_reach = tl.minimum(i_own_first + RATIO, n_blocks)
    o_list = i_query * n_heads + i_head
    p_index += tl.load(p_start + o_list).to(tl.int64)
    n_listed = 0
    for i_start in range(0, n_reach, CHUNK):
        o_block = i_start + tl.arange(0, CHUNK)
        m_taken = tl.load(p_vertical + o_block, mask=o_block < n_reach, other=0) > 0
        for i_row in tl.static_range(RATIO):  # of the query block; past the end they repeat the last one
            o_slash = tl.minimum(i_own_first + i_row, n_blocks - 1) - o_block
            m_taken = m_taken | (tl.load(p_slash + o_slash, mask=o_slash >= 0, other=0) > 0)
        b_place = n_listed + tl.cumsum(m_taken.to(tl.int32), 0) - 1
        tl.store(p_index + b_place, o_block, mask=m_taken)
        n_listed += tl.sum(m_taken.to(tl.int32), 0)
    tl.store(p_count + o_list, n_listed)


def share_mass(lse: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, block_k: int) -> None:
    """Make log-sum-exps, contiguous float32 ``[heads, N, key blocks]``, shares of the attention in place.

    ``positions``: int32 ``[N]``; what lies beyond a position's own block is left as it is, and not to be
    read. ``weight``: float32 ``[N]``."""
    heads, queries, blocks = lse.shape
    line_mass_kernel[(queries, heads)](
        lse, positions, weight, blocks, BLOCK_K=block_k, CHUNK=_CHUNK, num_warps=2
    )


def pick_lines(
    mass: torch.Tensor,
    positions: torch.Tensor,
    vertical: torch.Tensor,
    slash: torch.Tensor,
    given: torch.Tensor | None,
    counts: torch.Tensor,
    alpha: float,
    share: float | None,
    block_k: int,
) -> torch.Tensor:
    """Return the lines that are taken, bool ``[2, segments, heads, key blocks]``: vertical and slash ones.

    Args:
        mass: contiguous float32 ``[heads, segments * n, key blocks]``, see :func:`share_mass`.
        positions: int32 ``[segments * n]``.
        vertical, slash: contiguous float32 ``[segments, key blocks]``: the lines' lengths.
        given: bool ``[2, heads, key blocks]``.
        counts: int64 ``[2]``, added to: lines taken of those given, and others.
    """
    heads, queries, blocks = mass.shape
    segments = vertical.shape[0]
    keys = torch.empty(segments, heads, 2, blocks, dtype=torch.int32, device=mass.device)
    lines = torch.empty(2, segments, heads, blocks, dtype=torch.uint8, device=mass.device)
    before = lines if given is None else given.view(torch.uint8)
    sampled, by = queries // segments, BY_SHARE if share is not None else WHOLE if alpha == 1 else BY_WEIGHT
    chosen = {"GIVEN": given is not None, "BLOCK_K": block_k, "CHUNK": _CHUNK}
    line_keys_kernel[(heads, segments, 2 * triton.cdiv(blocks, _CHUNK))](
        mass, positions, vertical, slash, before, keys, blocks, sampled, **chosen, num_warps=4
    )
    pick_lines_kernel[(heads, segments)](
        mass,
        positions,
        keys,
        vertical,
        slash,
        before,
        lines,
        counts,
        blocks,
        sampled,
        float(share) if share is not None else alpha * (1 - 1e-6),
        **chosen,
        QUERIES=_QUERIES,
        BY=by.value,
        num_warps=16,
    )
    return lines.view(torch.bool)


def write_lines(
    lines: torch.Tensor,
    places: torch.Tensor,
    lists: BlockLists,
    first: int,
    segment: int,
    block_q: int,
    block_k: int,
) -> None:
    """Write what lines cross to the lists of their segments' query blocks.

    ``lines``: as of :func:`pick_lines`, of segments from ``first`` on. ``places``: int32
    ``[query blocks, 2]``, of the batch."""
    _, segments, heads, blocks = lines.shape
    list_lines_kernel[(heads, len(places))](
        lines.view(torch.uint8),
        places,
        lists.blocks,
        lists.starts,
        lists.counts,
        blocks,
        segments,
        first,
        SEGMENT=segment,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        CHUNK=_CHUNK,
        num_warps=4,
    )
