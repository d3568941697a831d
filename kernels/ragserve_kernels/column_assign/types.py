"""What `column_assign` reads, writes and returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ColumnState(NamedTuple):
    """Which page is in which column, and when pages were named last, per layer and KV head.

    Attributes:
        held: int32 ``[layers, kv_heads, columns]``: pages; negative: none.
        used: likewise: the number of the latest choice that has named it; 0: none.
        named: int32 ``[layers, kv_heads, pages]``: likewise, by page.
    """

    held: torch.Tensor
    used: torch.Tensor
    named: torch.Tensor


class Columns(NamedTuple):
    """Where the pages of a choice are, and what has to be loaded for that; int32 ``[layers, kv_heads, n]``.

    Attributes:
        placed: the choice with ``pages - 1 - column`` in place of each page below ``pages``.
        source, target: ``host`` of the missing pages whose columns nobody reads, and ``column_pages`` of
            their columns: first in each list, in the order of the choice, behind them -1.
        late_pages, late_columns: likewise the missing pages whose columns the choice before may name, as
            they are: numbers of pages and of columns.
        tally: ``[layers, kv_heads, 4]``: pages that were there, missing ones, late ones of these, and pages
            that the latest choices have named, this one included.
    """

    placed: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    late_pages: torch.Tensor
    late_columns: torch.Tensor
    tally: torch.Tensor
