"""The truth of ``cell_assign`` and what follows it in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.cell_assign.types import CellMoves, CellState
from ragserve_kernels.paged import PageSelection

NONE = -1
LARGEST = 2**31 - 1
PARTS = 1024  # of the pages attended to: the unit in which pages of different heads are compared


def cell_assign_naive(
    choice: PageSelection,
    state: CellState,
    host: torch.Tensor,
    own: torch.Tensor,
    *,
    number: int,
    counted: int,
    recent: int,
) -> CellMoves:
    """See :func:`ragserve_kernels.cell_assign.cell_assign`."""
    of, held, used, named = state
    none, nowhere, unnamed = len(of) - 1, len(held) - 1, len(named) - 1
    blocks = choice.blocks.flatten(0, 1).T  # [n, lists]
    lists = blocks.shape[1]
    rank = torch.arange(len(blocks), dtype=torch.int32, device=of.device)[:, None]
    is_page = (blocks >= 0) & (blocks < len(host))
    worth = rank * PARTS // choice.counts.flatten().clamp_min(1)
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
    cells = victims.masked_fill(index >= count, nowhere)
    before = held[cells].long()
    of.index_fill_(0, before.masked_fill_(before < 0, none), NONE)
    held.index_fill_(0, cells, NONE)
    used.index_fill_(0, cells, number)
    is_counted = wanted & (index < counted)
    named.index_fill_(0, (page * lists + which).masked_fill_(~is_counted, unnamed), number)
    latest = (named[:-1] > max(0, number - recent)).sum(0, keepdim=True)
    tally = torch.cat((there.sum(0, keepdim=True), count, torch.zeros_like(count), latest))
    return CellMoves(entries.int(), cells.int(), count.int(), tally.int())


def cell_arrive_naive(moves: CellMoves, state: CellState) -> None:
    """See :func:`ragserve_kernels.cell_assign.cell_arrive`."""
    entries, cells, n_moves, _ = moves
    is_none = torch.arange(len(entries), device=entries.device) >= n_moves
    state.of.scatter_(0, entries.long(), cells.masked_fill(is_none, NONE))
    state.held.scatter_(0, cells.long(), entries.masked_fill(is_none, NONE))


def cell_expect_naive(moves: CellMoves, state: CellState) -> None:
    """See :func:`ragserve_kernels.cell_assign.cell_expect`."""
    entries, cells, n_moves, _ = moves
    is_none = torch.arange(len(entries), device=entries.device) >= n_moves
    state.of.scatter_(0, entries.long(), (-2 - cells).masked_fill(is_none, NONE))
    state.held.scatter_(0, cells.long(), entries.masked_fill(is_none, NONE))


def cell_rest_naive(moves: CellMoves, state: CellState) -> CellMoves:
    """See :func:`ragserve_kernels.cell_assign.cell_rest`."""
    entries, cells, n_moves, tally = moves
    none, nowhere, n = len(state.of) - 1, len(state.held) - 1, len(entries)
    is_left = (torch.arange(n, device=entries.device) < n_moves) & (state.of[entries.long()] == -2 - cells)
    count = is_left.sum(0, keepdim=True).int()
    place = (is_left.cumsum(0) - 1).masked_fill_(~is_left, n)
    left = []
    for values, other in ((entries, none), (cells, nowhere)):
        gone = values.masked_fill(~is_left, other)
        left.append(values.new_full((n + 1,), other).scatter_(0, place, gone)[:-1])
    state.of.index_fill_(0, left[0].long(), NONE)
    state.held.index_fill_(0, left[1].long(), NONE)
    return CellMoves(left[0], left[1], count, torch.cat((tally[:1], count, n_moves - count, tally[3:])))
