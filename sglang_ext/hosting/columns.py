"""Columns of hosted requests: pages of the pool in which each layer and KV head keeps logical pages of its
own choice. The least recently chosen ones give way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

EMPTY = -1
RECENT = 12  # choices that make up a working set (SparseServe, 3.3)
COVERED = 0.9  # share of layers and heads whose working set their columns are to hold


class Loads(NamedTuple):
    """Logical pages to load and their columns, int32 like a choice: first in each layer and head, behind
    them -1."""

    pages: torch.Tensor
    targets: torch.Tensor


class Assigned(NamedTuple):
    """Where the pages of a choice are, and what has to be loaded for that.

    Attributes:
        columns: int32 like the choice: the column of each page; -1 where no page is.
        loads: misses whose columns nobody reads.
        late: misses whose columns the choice before may name: to be loaded when that is not read any more,
            and then to be told to `ColumnTable.settle`.
        counts: int64 [5]: pages that were there, pages to load, of them late, and pages that the latest
            `RECENT` choices have named, this one included, all summed over layers and heads; and the number
            that these are at most in `COVERED` of the layers and heads.
    """

    columns: torch.Tensor
    loads: Loads
    late: Loads
    counts: torch.Tensor


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

    def assign(self, wanted: torch.Tensor) -> Assigned:
        """Give every page of a choice a column.

        Args:
            wanted: int32 ``[layers, kv_heads, n]``: logical pages, distinct per layer and head; negative
                entries are none. At most as many per layer and head as there are columns.
        """
        n = min(wanted.shape[2], self.columns)
        self.choices += 1
        is_page = wanted >= 0
        same = (wanted[..., :, None] == self.held[..., None, :]) & is_page[..., :, None]  # [.., n, columns]
        there = same.any(-1)
        # victims in order: longest unused first, then by number; what the choice names goes last
        age = self._used.masked_fill(same.any(-2), self.choices)
        order = torch.sort(age, dim=-1, stable=True)
        victims = order.indices[..., :n].to(torch.int32)
        # what has never been named has age 0, and so has the choice before the first
        is_read = order.values[..., :n] >= max(1, self.choices - 1)
        missing = is_page & ~there
        rank = (missing.cumsum(-1) - 1).clamp(0, n - 1)
        columns = torch.where(
            there, same.to(torch.int32).argmax(-1).to(torch.int32), victims.gather(-1, rank)
        ).masked_fill_(~is_page, EMPTY)
        late = missing & is_read.gather(-1, rank)
        now = torch.full_like(wanted, self.choices)
        _put(self.held, columns.masked_fill(late, EMPTY), wanted)
        _put(self._used, columns, now)
        _put(self._named, wanted, now)
        recent = (self._named > max(0, self.choices - RECENT)).sum(-1).flatten()
        covering = recent.kthvalue(math.ceil(COVERED * recent.numel())).values
        counts = torch.stack((there.sum(), missing.sum(), late.sum(), recent.sum(), covering))
        return Assigned(
            columns, _loads(wanted, columns, missing & ~late), _loads(wanted, columns, late), counts
        )

    def settle(self, late: Loads) -> None:
        """Note that late pages are in their columns, but for those that have been forgotten since."""
        _put(self.held, late.targets.masked_fill(late.targets >= self.columns, EMPTY), late.pages)

    def resize(self, columns: int) -> None:
        """Add empty columns, or forget those from number ``columns`` on."""
        more = columns - self.columns
        if more > 0:
            empty = self.held.new_full((*self.held.shape[:2], more), EMPTY)
            held, used = torch.cat((self.held, empty), -1), torch.cat((self._used, empty + 1), -1)
        else:
            held, used = (each[..., :columns].contiguous() for each in (self.held, self._used))
        self.held, self._used = held, used


def _loads(wanted: torch.Tensor, columns: torch.Tensor, which: torch.Tensor) -> Loads:
    """Move some entries to the front; the entry behind the last takes what is not among them."""
    n = wanted.shape[2]
    pages = wanted.new_full((*wanted.shape[:2], n + 1), EMPTY)
    targets = pages.clone()
    place = (which.cumsum(-1) - 1).masked_fill(~which, n)
    pages.scatter_(-1, place, wanted.masked_fill(~which, EMPTY))
    targets.scatter_(-1, place, columns.masked_fill(~which, EMPTY))
    return Loads(pages[..., :n].contiguous(), targets[..., :n].contiguous())


def _put(table: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Write values to places along the last dimension; negative places are none."""
    wider = torch.cat((table, table[..., :1]), -1)  # with a place for them
    table.copy_(wider.scatter_(-1, places.long().masked_fill(places < 0, table.shape[-1]), values)[..., :-1])
