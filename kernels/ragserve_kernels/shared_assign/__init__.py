"""Give ranked pages of all layers and KV heads shared blocks of one pool: see README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.shared_assign.naive import (
    shared_arrive_naive,
    shared_assign_naive,
    shared_expect_naive,
    shared_rest_naive,
)
from ragserve_kernels.shared_assign.types import SharedMoves, SharedState

__all__ = [
    "SharedMoves",
    "SharedState",
    "shared_arrive",
    "shared_arrive_naive",
    "shared_assign",
    "shared_assign_naive",
    "shared_expect",
    "shared_expect_naive",
    "shared_rest",
    "shared_rest_naive",
]


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
    """Give as many pages as a request has shared blocks one of them, and take what is there out of ``state``.

    Pages of all layers and heads are ordered by rank over the number of pages that their head has attended
    to, then by rank. Of those that come first, one that a shared block holds keeps it; others take the shared
    blocks that have been named longest ago, in the order of ``own`` where that is the same. ``state`` does
    not say yet that they are there: see `shared_arrive`. Nothing waits for the device.

    Args:
        selection: ranked pages, blocks int32 ``[layers, kv_heads, n]``, distinct in each list; those that are
            negative or not below ``pages`` are left alone. counts ``[layers, kv_heads]``: how many the head
            has attended to.
        state: is changed.
        host: int32 ``[pages]``: host pages.
        own: int64 ``[shared_blocks]``: the request's shared blocks, distinct.
        number: of the selection, from 1; one more each time.
        counted: so many of the pages that come first count as named in ``SharedState.named``.
        recent: how many selections, this one included, the last figure of ``SharedMoves.tally`` is about.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    blocks = selection.blocks
    check("selection.blocks", blocks, torch.int32, (None, None, None), dense=True)
    check("selection.counts", selection.counts, torch.int32, blocks.shape[:2], like=blocks, dense=True)
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
        from ragserve_kernels.shared_assign import triton as kernels

        assign = kernels.shared_assign
    else:
        assign = shared_assign_naive
    return assign(selection, state, host, own, number=number, counted=counted, recent=recent)


def shared_arrive(moves: SharedMoves, state: SharedState) -> None:
    """Note that what was on its way is in its shared blocks.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    _check_moves(moves, state)
    if use_triton(moves.entries):
        from ragserve_kernels.shared_assign import triton as kernels

        kernels.shared_arrive(moves, state)
    else:
        shared_arrive_naive(moves, state)


def shared_expect(moves: SharedMoves, state: SharedState) -> None:
    """Let attention that reads what is to be moved from the host write it to its shared_blocks: see
    `ragserve_kernels.progressive_decode.SharedPages`. `shared_rest` ends that; a shared block may change
    hands before.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    _check_moves(moves, state)
    if not len(moves.entries):
        return
    if use_triton(moves.entries):
        from ragserve_kernels.shared_assign import triton as kernels

        kernels.shared_expect(moves, state)
    else:
        shared_expect_naive(moves, state)


def shared_rest(moves: SharedMoves, state: SharedState) -> SharedMoves:
    """Return the moves that nobody has made since `shared_expect`, in order, and take them out of ``state``:
    they are to be loaded, and to `shared_arrive`. The others are in their shared blocks.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    _check_moves(moves, state)
    check("moves.tally", moves.tally, torch.int32, (4,), like=moves.entries, dense=True)
    if not len(moves.entries):
        return moves
    if use_triton(moves.entries):
        from ragserve_kernels.shared_assign import triton as kernels

        return kernels.shared_rest(moves, state)
    return shared_rest_naive(moves, state)


def _check_moves(moves: SharedMoves, state: SharedState) -> None:
    check("moves.entries", moves.entries, torch.int32, (None,), dense=True)
    check(
        "moves.shared_blocks",
        moves.shared_blocks,
        torch.int32,
        moves.entries.shape,
        like=moves.entries,
        dense=True,
    )
    check("moves.n_moves", moves.n_moves, torch.int32, (1,), like=moves.entries)
    _check_state(state, moves.entries)


def _check_state(state: SharedState, like: torch.Tensor) -> None:
    check("state.of", state.of, torch.int32, (None,), like=like, dense=True)
    check("state.held", state.held, torch.int32, (None,), like=like, dense=True)
    check("state.used", state.used, torch.int32, state.held.shape, like=like, dense=True)
