"""Give ranked pages of all layers and KV heads cells of one pool: see README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.cell_assign.naive import (
    cell_arrive_naive,
    cell_assign_naive,
    cell_expect_naive,
    cell_rest_naive,
)
from ragserve_kernels.cell_assign.types import CellMoves, CellState
from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.paged import PageSelection

__all__ = [
    "CellMoves",
    "CellState",
    "cell_arrive",
    "cell_arrive_naive",
    "cell_assign",
    "cell_assign_naive",
    "cell_expect",
    "cell_expect_naive",
    "cell_rest",
    "cell_rest_naive",
]


def cell_assign(
    choice: PageSelection,
    state: CellState,
    host: torch.Tensor,
    own: torch.Tensor,
    *,
    number: int,
    counted: int,
    recent: int,
) -> CellMoves:
    """Give as many pages as a request has cells one of them, and take what is there out of ``state``.

    Pages of all layers and heads are ordered by rank over the number of pages that their head has attended
    to, then by rank. Of those that come first, one that a cell holds keeps it; others take the cells that
    have been named longest ago, in the order of ``own`` where that is the same. ``state`` does not say yet
    that they are there: see `cell_arrive`. Nothing waits for the device.

    Args:
        choice: ranked pages, blocks int32 ``[layers, kv_heads, n]``, distinct in each list; those that are
            negative or not below ``pages`` are left alone. counts ``[layers, kv_heads]``: how many the head
            has attended to.
        state: is changed.
        host: int32 ``[pages]``: host pages.
        own: int64 ``[cells]``: the request's cells, distinct.
        number: of the choice, from 1; one more each time.
        counted: so many of the pages that come first count as named in ``CellState.named``.
        recent: how many choices, this one included, the last figure of ``CellMoves.tally`` is about.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    blocks = choice.blocks
    check("choice.blocks", blocks, torch.int32, (None, None, None), dense=True)
    check("choice.counts", choice.counts, torch.int32, blocks.shape[:2], like=blocks, dense=True)
    lists = blocks.shape[0] * blocks.shape[1]
    _check_state(state, blocks)
    check("state.named", state.named, torch.int32, (len(host) * lists + 1,), like=blocks, dense=True)
    check("host", host, torch.int32, (None,), like=blocks, dense=True)
    check("own", own, torch.int64, (None,), like=blocks, dense=True)
    if number < 1 or recent < 1 or counted < 0:
        raise ValueError(
            f"number is {number}, recent {recent}, counted {counted}; expected 1, 1 and 0 at least."
        )
    if use_triton(blocks):
        from ragserve_kernels.cell_assign import triton as kernels

        assign = kernels.cell_assign
    else:
        assign = cell_assign_naive
    return assign(choice, state, host, own, number=number, counted=counted, recent=recent)


def cell_arrive(moves: CellMoves, state: CellState) -> None:
    """Note that what was on its way is in its cells.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    _check_moves(moves, state)
    if use_triton(moves.entries):
        from ragserve_kernels.cell_assign import triton as kernels

        kernels.cell_arrive(moves, state)
    else:
        cell_arrive_naive(moves, state)


def cell_expect(moves: CellMoves, state: CellState) -> None:
    """Let attention that reads what is to be moved from the host write it to its cells: see
    `ragserve_kernels.progressive_decode.PageCells`. `cell_rest` ends that; a cell may change hands before.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    _check_moves(moves, state)
    if not len(moves.entries):
        return
    if use_triton(moves.entries):
        from ragserve_kernels.cell_assign import triton as kernels

        kernels.cell_expect(moves, state)
    else:
        cell_expect_naive(moves, state)


def cell_rest(moves: CellMoves, state: CellState) -> CellMoves:
    """Return the moves that nobody has made since `cell_expect`, in order, and take them out of ``state``:
    they are to be loaded, and to `cell_arrive`. The others are in their cells.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    _check_moves(moves, state)
    check("moves.tally", moves.tally, torch.int32, (4,), like=moves.entries, dense=True)
    if not len(moves.entries):
        return moves
    if use_triton(moves.entries):
        from ragserve_kernels.cell_assign import triton as kernels

        return kernels.cell_rest(moves, state)
    return cell_rest_naive(moves, state)


def _check_moves(moves: CellMoves, state: CellState) -> None:
    check("moves.entries", moves.entries, torch.int32, (None,), dense=True)
    check("moves.cells", moves.cells, torch.int32, moves.entries.shape, like=moves.entries, dense=True)
    check("moves.n_moves", moves.n_moves, torch.int32, (1,), like=moves.entries)
    _check_state(state, moves.entries)


def _check_state(state: CellState, like: torch.Tensor) -> None:
    check("state.of", state.of, torch.int32, (None,), like=like, dense=True)
    check("state.held", state.held, torch.int32, (None,), like=like, dense=True)
    check("state.used", state.used, torch.int32, state.held.shape, like=like, dense=True)
