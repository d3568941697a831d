"""What `shared_assign` reads, writes and returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SharedState(NamedTuple):
    """Which shared block holds which page of a layer and KV head, and when they were named last; int32.

    An *entry* is a host page in one layer and head, numbered ``host page * lists + layer * kv_heads + head``
    with ``lists`` layers times KV heads; a *shared block* is likewise a page of the pool. The last element of
    each tensor stands for none.

    Attributes:
        of: ``[host pages * lists + 1]``: the shared block of each entry; -1: none; less: shared block ``-2 -
            value`` is to have it, and whoever reads it from the host may write it there.
        held: ``[pages of the pool * lists + 1]``: the entry in each shared block, or that it is to have so;
            negative: none.
        used: likewise: the number of the latest selection that has named what the shared block holds; 0:
            none.
        named: ``[pages * lists + 1]``: likewise, by page of the request, layer and head.
    """

    of: torch.Tensor
    held: torch.Tensor
    used: torch.Tensor
    named: torch.Tensor


class SharedMoves(NamedTuple):
    """Entries on their way into shared blocks; int32.

    Attributes:
        entries, shared_blocks: ``[n]``: what goes where. The first ``n_moves`` are used, behind them are the
            last elements' numbers.
        n_moves: ``[1]``.
        tally: ``[4]``: pages that were there; missing ones, but for the next: those that have been written by
            whoever read them (see `shared_rest`); and pages that the latest selections have named, this one
            included.
    """

    entries: torch.Tensor
    shared_blocks: torch.Tensor
    n_moves: torch.Tensor
    tally: torch.Tensor
