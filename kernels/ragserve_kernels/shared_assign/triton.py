# mypy: disable-error-code="no-untyped-def"
"""The kernels of ``shared_assign``, around two stable sorts of torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.paged import PageSelection
from ragserve_kernels.shared_assign.naive import LARGEST, PARTS
from ragserve_kernels.shared_assign.types import SharedMoves, SharedState

_STEP = 1024  # pages at a time


@triton.jit(do_not_specialize=["n", "lists", "pages"])
def _worth(
    p_blocks,  # int32 [lists, n]
    p_counts,  # int32 [lists]
    p_worth,  # int32 [n, lists]
    n,
    lists,
    pages,
    PARTS: tl.constexpr,
    LARGEST: tl.constexpr,
    STEP: tl.constexpr,
):
    o_page = tl.program_id(0) * STEP + tl.arange(0, STEP)
    m_page = o_page < n * lists
    i_rank, i_list = o_page // lists, o_page % lists
    # [STEP] each
    b_block = tl.load(p_blocks + i_list * n + i_rank, mask=m_page, other=-1)
    b_count = tl.load(p_counts + i_list, mask=m_page, other=1)
    b_worth = i_rank * PARTS // tl.maximum(b_count, 1)
    m_host = (b_block >= 0) & (b_block < pages)
    tl.store(p_worth + o_page, tl.where(m_host, b_worth, LARGEST), mask=m_page)


@triton.jit(do_not_specialize=["n", "lists", "pages", "n_order", "number", "counted"])
def _find(
    p_order,  # int64 [n_order]: places in `_worth`'s output
    p_blocks,
    p_host,  # int32 [pages]
    p_of,  # see `SharedState`
    p_used,
    p_named,
    p_entries,  # int32 [n_order]
    p_n_moves,  # int32 [1]
    p_tally,  # int32 [4]
    n,
    lists,
    pages,
    n_order,
    number,
    counted,
    STEP: tl.constexpr,
):
    # one program: what is missing goes to the front of a list, in order
    n_missing = 0
    n_there = 0
    for i_first in range(0, n_order, STEP):
        o_place = i_first + tl.arange(0, STEP)
        m_place = o_place < n_order
        # [STEP] each
        i_order = tl.load(p_order + o_place, mask=m_place, other=0).to(tl.int32)
        i_rank, i_list = i_order // lists, i_order % lists
        b_block = tl.load(p_blocks + i_list * n + i_rank, mask=m_place, other=-1)
        m_page = m_place & (b_block >= 0) & (b_block < pages)
        i_entry = tl.load(p_host + b_block, mask=m_page, other=0) * lists + i_list
        i_shared = tl.load(p_of + i_entry, mask=m_page, other=-1)
        m_there = m_page & (i_shared >= 0)
        m_missing = m_page & (i_shared < 0)
        b_number = tl.zeros([STEP], tl.int32) + number
        tl.store(p_used + i_shared, b_number, mask=m_there)
        tl.store(p_named + b_block * lists + i_list, b_number, mask=m_page & (o_place < counted))
        b_missing = m_missing.to(tl.int32)
        i_to = n_missing + tl.cumsum(b_missing, 0) - 1
        tl.store(p_entries + i_to, i_entry, mask=m_missing)
        n_missing += tl.sum(b_missing, 0)
        n_there += tl.sum(m_there.to(tl.int32), 0)
    tl.store(p_n_moves, n_missing)
    tl.store(p_tally, n_there)
    tl.store(p_tally + 1, n_missing)
    tl.store(p_tally + 2, 0)


@triton.jit(do_not_specialize=["n_order", "none", "nowhere", "number"])
def _take(
    p_oldest,  # int64: places in ``own``, longest unused first
    p_own,  # int64
    p_of,
    p_held,
    p_used,
    p_entries,
    p_shared,  # int32 [n_order]
    p_n_moves,
    n_order,
    none,
    nowhere,
    number,
    STEP: tl.constexpr,
):
    o_move = tl.program_id(0) * STEP + tl.arange(0, STEP)
    m_order = o_move < n_order
    m_move = o_move < tl.minimum(tl.load(p_n_moves), n_order)
    # [STEP] each
    i_own = tl.load(p_oldest + o_move, mask=m_move, other=0)
    i_shared = tl.load(p_own + i_own, mask=m_move, other=0).to(tl.int32)
    i_before = tl.load(p_held + i_shared, mask=m_move, other=-1)
    b_none = tl.zeros([STEP], tl.int32) - 1
    tl.store(p_of + i_before, b_none, mask=m_move & (i_before >= 0))
    tl.store(p_held + i_shared, b_none, mask=m_move)
    tl.store(p_used + i_shared, tl.zeros([STEP], tl.int32) + number, mask=m_move)
    tl.store(p_shared + o_move, tl.where(m_move, i_shared, nowhere), mask=m_order)
    tl.store(p_entries + o_move, tl.zeros([STEP], tl.int32) + none, mask=m_order & (m_move == 0))


@triton.jit(do_not_specialize=["n_order"])
def _enter(p_entries, p_shared, p_n_moves, p_of, p_held, n_order, STEP: tl.constexpr, EXPECTED: tl.constexpr):
    o_move = tl.program_id(0) * STEP + tl.arange(0, STEP)
    m_move = o_move < tl.minimum(tl.load(p_n_moves), n_order)
    # [STEP] each
    i_entry = tl.load(p_entries + o_move, mask=m_move, other=0)
    i_shared = tl.load(p_shared + o_move, mask=m_move, other=0)
    tl.store(p_of + i_entry, -2 - i_shared if EXPECTED else i_shared, mask=m_move)
    tl.store(p_held + i_shared, i_entry, mask=m_move)


def shared_assign(
    selection: PageSelection,
    state: SharedState,
    host: torch.Tensor,
    own: torch.Tensor,
    *,
    number: int,
    counted: int,
    recent: int,
) -> SharedMoves:
    """Launch the kernels; see :func:`ragserve_kernels.shared_assign.shared_assign`."""
    of, held, used, named = state
    blocks = selection.blocks
    n, lists = blocks.shape[2], blocks.shape[0] * blocks.shape[1]
    worth = blocks.new_empty(n * lists)
    _worth[(triton.cdiv(n * lists, _STEP),)](
        *(blocks, selection.counts, worth, n, lists, len(host)),
        PARTS=PARTS,
        LARGEST=LARGEST,
        STEP=_STEP,
        num_warps=4,
    )
    n_order = min(len(own), n * lists)
    entries, shared_blocks = blocks.new_empty(2, n_order).unbind(0)
    n_moves, tally = blocks.new_empty(1), blocks.new_empty(4)
    _find[(1,)](
        *(worth.argsort(stable=True), blocks, host, of, used, named, entries, n_moves, tally),
        *(n, lists, len(host), n_order, number, counted),
        STEP=_STEP,
        num_warps=8,
    )
    _take[(triton.cdiv(n_order, _STEP),)](
        *(used[own].argsort(stable=True), own, of, held, used, entries, shared_blocks, n_moves),
        *(n_order, len(of) - 1, len(held) - 1, number),
        STEP=_STEP,
        num_warps=4,
    )
    torch.sum(named[:-1] > max(0, number - recent), 0, keepdim=True, dtype=torch.int32, out=tally[3:])
    return SharedMoves(entries, shared_blocks, n_moves, tally)


@triton.jit(do_not_specialize=["n_order", "none", "nowhere"])
def _rest(
    p_entries,  # int32 [n_order]
    p_shared,
    p_n_moves,  # int32 [1]
    p_tally,  # int32 [4]
    p_of,
    p_held,
    p_entries_left,  # as the four above, which they take the place of
    p_shared_left,
    p_n_left,
    p_tally_left,
    n_order,
    none,
    nowhere,
    STEP: tl.constexpr,
):
    # one program, as in `_find`
    n_moves = tl.minimum(tl.load(p_n_moves), n_order)
    n_left = 0
    b_none = tl.zeros([STEP], tl.int32) - 1
    for i_first in range(0, n_moves, STEP):
        o_move = i_first + tl.arange(0, STEP)
        m_move = o_move < n_moves
        # [STEP] each
        i_entry = tl.load(p_entries + o_move, mask=m_move, other=0)
        i_shared = tl.load(p_shared + o_move, mask=m_move, other=0)
        m_left = m_move & (tl.load(p_of + i_entry, mask=m_move, other=-1) == -2 - i_shared)
        b_left = m_left.to(tl.int32)
        i_to = n_left + tl.cumsum(b_left, 0) - 1
        tl.store(p_entries_left + i_to, i_entry, mask=m_left)
        tl.store(p_shared_left + i_to, i_shared, mask=m_left)
        tl.store(p_held + i_shared, b_none, mask=m_left)
        n_left += tl.sum(b_left, 0)
    for i_first in range(n_left // STEP * STEP, n_order, STEP):
        o_move = i_first + tl.arange(0, STEP)
        m_none = (o_move >= n_left) & (o_move < n_order)
        tl.store(p_entries_left + o_move, tl.zeros([STEP], tl.int32) + none, mask=m_none)
        tl.store(p_shared_left + o_move, tl.zeros([STEP], tl.int32) + nowhere, mask=m_none)
    tl.store(p_n_left, n_left)
    tl.store(p_tally_left, tl.load(p_tally))
    tl.store(p_tally_left + 1, n_left)
    tl.store(p_tally_left + 2, n_moves - n_left)
    tl.store(p_tally_left + 3, tl.load(p_tally + 3))


@triton.jit(do_not_specialize=["n_order"])
def _leave(p_entries, p_n_moves, p_of, n_order, STEP: tl.constexpr):
    o_move = tl.program_id(0) * STEP + tl.arange(0, STEP)
    m_move = o_move < tl.minimum(tl.load(p_n_moves), n_order)
    i_entry = tl.load(p_entries + o_move, mask=m_move, other=0)
    tl.store(p_of + i_entry, tl.zeros([STEP], tl.int32) - 1, mask=m_move)


def shared_expect(moves: SharedMoves, state: SharedState) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.shared_assign.shared_expect`."""
    _launch_enter(moves, state, expected=True)


def shared_rest(moves: SharedMoves, state: SharedState) -> SharedMoves:
    """Launch the kernels; see :func:`ragserve_kernels.shared_assign.shared_rest`."""
    n_order = len(moves.entries)
    left = SharedMoves(*(torch.empty_like(each) for each in moves))
    _rest[(1,)](
        *(*moves, state.of, state.held, *left, n_order, len(state.of) - 1, len(state.held) - 1),
        STEP=_STEP,
        num_warps=8,
    )
    # behind it: a warp that looks again must find what it has found before
    _leave[(triton.cdiv(n_order, _STEP),)](
        *(left.entries, left.n_moves, state.of, n_order), STEP=_STEP, num_warps=4
    )
    return left


def shared_arrive(moves: SharedMoves, state: SharedState) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.shared_assign.shared_arrive`."""
    _launch_enter(moves, state, expected=False)


def _launch_enter(moves: SharedMoves, state: SharedState, *, expected: bool) -> None:
    n_order = len(moves.entries)
    _enter[(triton.cdiv(n_order, _STEP),)](
        *(moves.entries, moves.shared_blocks, moves.n_moves, state.of, state.held, n_order),
        STEP=_STEP,
        EXPECTED=expected,
        num_warps=4,
    )
