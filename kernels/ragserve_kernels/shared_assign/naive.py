"""The truth of ``shared_assign`` and what follows it in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.paged import PageSelection
from ragserve_kernels.shared_assign.types import SharedMoves, SharedState

NONE = -1
LARGEST = 2**31 - 1
PARTS = 1024  # of the pages attended to: the unit in which pages of different heads are compared


def shared_assign_naive(
    selection: PageSelection,
    state: SharedState,
    host: torch.Tensor,
    own: torch.Tensor,
    *,
    number: int,
    counted: int,
    recent: int,
) -> SharedMoves:
    """See :func:`ragserve_kernels.shared_assign.shared_assign`."""
    of, held, used, named = state
    none, nowhere, unnamed = len(of) - 1, len(held) - 1, len(named) - 1
    blocks = selection.blocks.flatten(0, 1).T  # [n, lists]
    lists = blocks.shape[1]
    rank = torch.arange(len(blocks), dtype=torch.int32, device=of.device)[:, None]
    is_page = (blocks >= 0) & (blocks < len(host))
    worth = rank * PARTS // selection.counts.flatten().clamp_min(1)
    order = worth.masked_fill(~is_page, LARGEST).flatten().argsort(stable=True)[: len(own)]
    page, which = blocks.flatten()[order].long(), order % lists
    wanted = is_page.flatten()[order]
    page = page.masked_fill(~wanted, 0)
    entry = (host[page].long() * lists + which).masked_fill_(~wanted, none)
    at = of[entry].long()
    there = wanted & (at >= 0)
    missing = wanted & ~there
    used.index_fill_(0, at.masked_fill(~there, nowhere), number)
    victims = own[used[own].argsort(stable=True)][: len(order)]
    count = missing.sum(0, keepdim=True)
    index = torch.arange(len(order), device=of.device)
    entries = entry.new_full((len(order) + 1,), none)
    place = (missing.cumsum(0) - 1).masked_fill_(~missing, len(order))
    entries = entries.scatter_(0, place, entry.masked_fill(~missing, none))[:-1]
    shared_blocks = victims.masked_fill(index >= count, nowhere)
    before = held[shared_blocks].long()
    of.index_fill_(0, before.masked_fill_(before < 0, none), NONE)
    held.index_fill_(0, shared_blocks, NONE)
    used.index_fill_(0, shared_blocks, number)
    is_counted = wanted & (index < counted)
    named.index_fill_(0, (page * lists + which).masked_fill_(~is_counted, unnamed), number)
    latest = (named[:-1] > max(0, number - recent)).sum(0, keepdim=True)
    tally = torch.cat((there.sum(0, keepdim=True), count, torch.zeros_like(count), latest))
    return SharedMoves(entries.int(), shared_blocks.int(), count.int(), tally.int())


def shared_arrive_naive(moves: SharedMoves, state: SharedState) -> None:
    """See :func:`ragserve_kernels.shared_assign.shared_arrive`."""
    entries, shared_blocks, n_moves, _ = moves
    is_none = torch.arange(len(entries), device=entries.device) >= n_moves
    state.of.scatter_(0, entries.long(), shared_blocks.masked_fill(is_none, NONE))
    state.held.scatter_(0, shared_blocks.long(), entries.masked_fill(is_none, NONE))


def shared_expect_naive(moves: SharedMoves, state: SharedState) -> None:
    """See :func:`ragserve_kernels.shared_assign.shared_expect`."""
    entries, shared_blocks, n_moves, _ = moves
    is_none = torch.arange(len(entries), device=entries.device) >= n_moves
    state.of.scatter_(0, entries.long(), (-2 - shared_blocks).masked_fill(is_none, NONE))
    state.held.scatter_(0, shared_blocks.long(), entries.masked_fill(is_none, NONE))


def shared_rest_naive(moves: SharedMoves, state: SharedState) -> SharedMoves:
    """See :func:`ragserve_kernels.shared_assign.shared_rest`."""
    entries, shared_blocks, n_moves, tally = moves
    none, nowhere, n = len(state.of) - 1, len(state.held) - 1, len(entries)
    is_left = (torch.arange(n, device=entries.device) < n_moves) & (
        state.of[entries.long()] == -2 - shared_blocks
    )
    count = is_left.sum(0, keepdim=True).int()
    place = (is_left.cumsum(0) - 1).masked_fill_(~is_left, n)
    left = []
    for values, other in ((entries, none), (shared_blocks, nowhere)):
        gone = values.masked_fill(~is_left, other)
        left.append(values.new_full((n + 1,), other).scatter_(0, place, gone)[:-1])
    state.of.index_fill_(0, left[0].long(), NONE)
    state.held.index_fill_(0, left[1].long(), NONE)
    return SharedMoves(left[0], left[1], count, torch.cat((tally[:1], count, n_moves - count, tally[3:])))
