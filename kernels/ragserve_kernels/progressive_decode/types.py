"""The rounds of progressive decoding, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ragserve_kernels.context_gather import HostContexts
from ragserve_kernels.kv import KVLayers

__all__ = ["MAX_TILE", "PagePlaces", "Progressive", "Rounds", "SharedPages"]

MAX_TILE = 64
"""Tokens of the largest tile. Rounds end at whole tiles: blocks smaller than a tile are read together."""


class Progressive(NamedTuple):
    """The output of one layer's step, and how much was read for it."""

    out: torch.Tensor
    """[batch, heads, head_dim], q's dtype."""
    blocks_used: torch.Tensor
    """int32 [batch, kv_heads]: ranked blocks attended to."""
    weight: torch.Tensor
    """float32 [batch, heads]: the estimated share of the attention weight in them; 1 if they are all."""
    from_host: torch.Tensor | None = None
    """int32 [batch, kv_heads]: how many of the blocks were read from the host; None without
    :class:`PagePlaces`."""


class SharedPages(NamedTuple):
    """Host pages of which the pool has copies. A *shared block* is the place of one page in one layer and KV
    head of the pool, numbered ``(page * layers + layer) * kv_heads + head``; it may hold a page of any layer
    and head."""

    of: torch.Tensor
    """int32 [numbers, layers, kv_heads], contiguous, on the pool's device: the shared block that holds a host
    page of a layer and head; -1: none does; less: shared block ``-2 - value`` is to. Attention to such a
    page, if it is whole, writes it there, reads it there, and enters the shared block here. As many numbers
    as there are host pages, or more for pages of contexts. Each is read for one request at a time."""
    pool: KVLayers
    """The pool, of which K and V that attention is given are one layer."""


class PagePlaces(NamedTuple):
    """Where each KV head has the pages of a request: in the pool, or in host memory.

    It takes the place of ``PagedBatch.page_table`` for pages that are not in the pool, or in other pages of
    it for every head."""

    places: torch.Tensor
    """int32 [batch, kv_heads, n], last dimension contiguous, n at least the pages of the longest request: a
    page of the pool, or ``-1 - number`` for a page of ``host`` or of a context."""
    host: torch.Tensor
    """[pages, 2 (K, V), layers, kv_heads, page, head_dim] in host memory, contiguous, pinned if the pool is
    on a GPU; q's dtype."""
    layer: int
    """Of ``host``, the layer that attends."""
    shared_blocks: SharedPages | None = None
    """Where pages of the host are read instead, if the pool has them."""
    contexts: HostContexts | None = None
    """Numbers that name a page of a context instead of one of ``host``."""


@dataclass(frozen=True)
class Rounds:
    """Sizes of the rounds over a ranking.

    Attributes:
        first: blocks of the first round.
        growth: each later round has this many times the blocks of the one before.
        forced: the first ``forced`` blocks of a ranking (the first and the newest block of the sequence) are
            attended to in the first round whatever their score. They do not enter the bound, since they were
            not ranked.

    Raises:
        ValueError: a value out of range.
    """

    first: int = 16
    growth: float = 2.0
    forced: int = 2

    def __post_init__(self) -> None:
        if self.first < 1 or self.growth < 1.0 or self.forced < 0:
            raise ValueError(
                f"first, growth and forced are {self.first}, {self.growth} and {self.forced}; "
                "expected at least 1 block, a factor of at least 1 and 0 blocks or more."
            )

    def ends(self, capacity: int, block_size: int) -> list[int]:
        """Return the ranks (exclusive) at which the rounds over ``capacity`` blocks end, at least one.

        All ends but the last fall on whole tiles of :data:`MAX_TILE` tokens."""
        multiple = max(1, MAX_TILE // block_size)
        ends: list[int] = []
        size = float(max(self.first, self.forced))
        while not ends or ends[-1] < capacity:
            step = max(multiple, math.ceil(size / multiple) * multiple)
            ends.append(min(capacity, (ends[-1] if ends else 0) + step))
            size *= self.growth
        return ends
