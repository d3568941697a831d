"""Resident blocks of offloaded requests: pages of the pool in which each layer and KV head keeps logical
pages of its own selection. The least recently selected ones are replaced.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ragserve_kernels.paged import PageSelection
from ragserve_kernels.resident_assign import ResidentBlocks, ResidentState, resident_assign

EMPTY = -1
RECENT = 12  # selections that make up a working set (SparseServe, 3.3)
COVERED = 0.9  # share of layers and heads whose working set their resident blocks are to hold


class ResidentTable:
    """Logical pages in the resident blocks of one request, per layer and KV head. Nothing waits for the
    device.

    Pages of a selection become the latest used. Resident blocks of the selection before are given away last,
    and what is to go there is *late*: whoever attends by that selection may go on meanwhile. Nothing is late
    with twice as many resident blocks as a selection has pages."""

    def __init__(
        self, layers: int, kv_heads: int, resident_blocks: int, pages: int, device: torch.device
    ) -> None:
        """``pages``: logical pages that a selection may name, from 0."""
        self.held = torch.full((layers, kv_heads, resident_blocks), EMPTY, dtype=torch.int32, device=device)
        self._used = torch.zeros_like(self.held)  # number of the latest selection that has named it; 0: none
        self._named = torch.zeros(
            layers, kv_heads, pages, dtype=torch.int32, device=device
        )  # likewise, by page
        self.selections = 0

    @property
    def resident_blocks(self) -> int:
        return self.held.shape[2]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `assign` reads and writes, for other streams than that of the constructor."""
        return self.held, self._used, self._named

    @property
    def lists(self) -> int:
        """Layers times KV heads."""
        return self.held[..., 0].numel()

    def assign(
        self, selection: PageSelection, host: torch.Tensor, resident_pages: torch.Tensor
    ) -> ResidentBlocks:
        """Give every page of a selection a resident_block: see `resident_assign`, whose arguments these are.

        `ResidentBlocks.source` and ``target`` are to be loaded: nobody reads these resident blocks. What is
        late is to be loaded when the selection before is not read any more, and then to be told to
        `settle`."""
        self.selections += 1
        state = ResidentState(self.held, self._used, self._named)
        return resident_assign(selection, state, host, resident_pages, number=self.selections, recent=RECENT)

    def settle(self, found: ResidentBlocks) -> None:
        """Note that late pages are in their resident blocks, but for those that have been forgotten since."""
        places = found.late_resident_blocks.long()
        is_there = (places >= 0) & (places < self.resident_blocks)
        wider = torch.cat((self.held, self.held[..., :1]), -1)  # with a place for the others
        wider.scatter_(-1, places.masked_fill(~is_there, self.resident_blocks), found.late_pages)
        self.held.copy_(wider[..., :-1])

    def resize(self, resident_blocks: int) -> None:
        """Add empty resident blocks, or forget those from number ``resident_blocks`` on."""
        more = resident_blocks - self.resident_blocks
        if more > 0:
            empty = self.held.new_full((*self.held.shape[:2], more), EMPTY)
            held, used = torch.cat((self.held, empty), -1), torch.cat((self._used, empty + 1), -1)
        else:
            held, used = (each[..., :resident_blocks].contiguous() for each in (self.held, self._used))
        self.held, self._used = held, used

    def drop(self, resident_pages: torch.Tensor) -> None:
        """Resident blocks that `resize` has forgotten are given back: no selection names them."""

    def tallied(self, tally: torch.Tensor) -> tuple[int, int, int, int, int]:
        """Sum up `ResidentBlocks.tally`, on the host: pages that were there, missing ones, late ones, and
        pages that the latest `RECENT` selections have named, over layers and heads; and the number that these
        are at most in `COVERED` of the layers and heads."""
        lists = tally.flatten(0, 1).numpy()
        place = math.ceil(COVERED * len(lists)) - 1
        hits, misses, late, named = lists.sum(0).tolist()
        return hits, misses, late, named, int(np.partition(lists[:, 3], place)[place])
