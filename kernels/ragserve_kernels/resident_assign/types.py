"""What `resident_assign` reads, writes and returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ResidentState(NamedTuple):
    """Which page is in which resident block, and when pages were named last, per layer and KV head.

    Attributes:
        held: int32 ``[layers, kv_heads, resident_blocks]``: pages; negative: none.
        used: likewise: the number of the latest selection that has named it; 0: none.
        named: int32 ``[layers, kv_heads, pages]``: likewise, by page.
    """

    held: torch.Tensor
    used: torch.Tensor
    named: torch.Tensor


class ResidentBlocks(NamedTuple):
    """Where the pages of a selection are, and what has to be loaded for that; int32 ``[layers, kv_heads,
    n]``.

    Attributes:
        placed: the selection with ``pages - 1 - resident_block`` in place of each page below ``pages``.
        source, target: ``host`` of the missing pages whose resident blocks nobody reads, and
            ``resident_pages`` of their resident_blocks: first in each list, in the order of the selection,
            behind them -1.
        late_pages, late_resident_blocks: likewise the missing pages whose resident blocks the selection
            before may name, as they are: numbers of pages and of resident blocks.
        tally: ``[layers, kv_heads, 4]``: pages that were there, missing ones, late ones of these, and pages
            that the latest selections have named, this one included.
    """

    placed: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    late_pages: torch.Tensor
    late_resident_blocks: torch.Tensor
    tally: torch.Tensor
