"""Columns of hosted requests: pages of the pool in which each layer and KV head keeps logical pages of its
own choice. The least recently chosen ones give way.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ragserve_kernels.column_assign import Columns, ColumnState, column_assign
from ragserve_kernels.paged import PageSelection

EMPTY = -1
RECENT = 12  # choices that make up a working set (SparseServe, 3.3)
COVERED = 0.9  # share of layers and heads whose working set their columns are to hold


class ColumnTable:
    """Logical pages in the columns of one request, per layer and KV head. Nothing waits for the device.

    Pages of a choice become the latest used. Columns of the choice before are given away last, and what is to
    go there is *late*: whoever attends by that choice may go on meanwhile. Nothing is late with twice as many
    columns as a choice has pages."""

    def __init__(self, layers: int, kv_heads: int, columns: int, pages: int, device: torch.device) -> None:
        """``pages``: logical pages that a choice may name, from 0."""
        self.held = torch.full((layers, kv_heads, columns), EMPTY, dtype=torch.int32, device=device)
        self._used = torch.zeros_like(self.held)  # number of the latest choice that has named it; 0: none
        self._named = torch.zeros(
            layers, kv_heads, pages, dtype=torch.int32, device=device
        )  # likewise, by page
        self.choices = 0

    @property
    def columns(self) -> int:
        return self.held.shape[2]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `assign` reads and writes, for other streams than that of the constructor."""
        return self.held, self._used, self._named

    @property
    def lists(self) -> int:
        """Layers times KV heads."""
        return self.held[..., 0].numel()

    def assign(self, choice: PageSelection, host: torch.Tensor, column_pages: torch.Tensor) -> Columns:
        """Give every page of a choice a column: see `column_assign`, whose arguments these are.

        `Columns.source` and ``target`` are to be loaded: nobody reads these columns. What is late is to be
        loaded when the choice before is not read any more, and then to be told to `settle`."""
        self.choices += 1
        state = ColumnState(self.held, self._used, self._named)
        return column_assign(choice, state, host, column_pages, number=self.choices, recent=RECENT)

    def settle(self, found: Columns) -> None:
        """Note that late pages are in their columns, but for those that have been forgotten since."""
        places = found.late_columns.long()
        is_there = (places >= 0) & (places < self.columns)
        wider = torch.cat((self.held, self.held[..., :1]), -1)  # with a place for the others
        wider.scatter_(-1, places.masked_fill(~is_there, self.columns), found.late_pages)
        self.held.copy_(wider[..., :-1])

    def resize(self, columns: int) -> None:
        """Add empty columns, or forget those from number ``columns`` on."""
        more = columns - self.columns
        if more > 0:
            empty = self.held.new_full((*self.held.shape[:2], more), EMPTY)
            held, used = torch.cat((self.held, empty), -1), torch.cat((self._used, empty + 1), -1)
        else:
            held, used = (each[..., :columns].contiguous() for each in (self.held, self._used))
        self.held, self._used = held, used

    def drop(self, column_pages: torch.Tensor) -> None:
        """Columns that `resize` has forgotten are given back: no choice names them."""

    def tallied(self, tally: torch.Tensor) -> tuple[int, int, int, int, int]:
        """Sum up `Columns.tally`, on the host: pages that were there, missing ones, late ones, and pages that
        the latest `RECENT` choices have named, over layers and heads; and the number that these are at most
        in `COVERED` of the layers and heads."""
        lists = tally.flatten(0, 1).numpy()
        place = math.ceil(COVERED * len(lists)) - 1
        hits, misses, late, named = lists.sum(0).tolist()
        return hits, misses, late, named, int(np.partition(lists[:, 3], place)[place])
