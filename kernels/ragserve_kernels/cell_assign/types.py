"""What `cell_assign` reads, writes and returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class CellState(NamedTuple):
    """Which cell holds which page of a layer and KV head, and when they were named last; int32.

    An *entry* is a host page in one layer and head, numbered ``host page * lists + layer * kv_heads + head``
    with ``lists`` layers times KV heads; a *cell* is likewise a page of the pool. The last element of each
    tensor stands for none.

    Attributes:
        of: ``[host pages * lists + 1]``: the cell of each entry; -1: none; less: cell ``-2 - value`` is to
            have it, and whoever reads it from the host may write it there.
        held: ``[pages of the pool * lists + 1]``: the entry in each cell, or that it is to have so; negative:
            none.
        used: likewise: the number of the latest choice that has named what the cell holds; 0: none.
        named: ``[pages * lists + 1]``: likewise, by page of the request, layer and head.
    """

    of: torch.Tensor
    held: torch.Tensor
    used: torch.Tensor
    named: torch.Tensor


class CellMoves(NamedTuple):
    """Entries on their way into cells; int32.

    Attributes:
        entries, cells: ``[n]``: what goes where. The first ``n_moves`` are used, behind them are the last
            elements' numbers.
        n_moves: ``[1]``.
        tally: ``[4]``: pages that were there; missing ones, but for the next: those that have been written by
            whoever read them (see `cell_rest`); and pages that the latest choices have named, this one
            included.
    """

    entries: torch.Tensor
    cells: torch.Tensor
    n_moves: torch.Tensor
    tally: torch.Tensor
