"""An extend batch as ``sparse_prefill`` reads it, and lists of the key blocks to attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ragserve_kernels.dispatch import check
from ragserve_kernels.kv import check_page_size

__all__ = ["BLOCK_SIZES", "BlockLists", "PrefillBatch", "SplitLists"]

BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """The requests of an extend batch and where their KV lies. Made by :meth:`of`; checked there.

    Blocks are counted from a request's position 0, whatever its prefix: the query block of position p is
    p // block_q. A block that the prefix ends in has only its new rows in the batch.

    Attributes:
        page_table: int32 ``[requests, max_pages]``: physical pages; a token's slot is page * page_size +
            offset. Only entries of pages that hold a token are read.
        page_size: tokens per page.
        block_q: positions per query block; block_k: positions per key block. Both one of ``BLOCK_SIZES``.
        prefix: tokens of each request that were there before; new: those of the batch, in rows.
        bounds: int32 ``[requests, 3]``: prefix, length with the new tokens, and first row of each request.
        places: int32 ``[query blocks, 2]``: request and number of each query block, by request and position.
    """

    page_table: torch.Tensor
    page_size: int
    block_q: int
    block_k: int
    prefix: tuple[int, ...]
    new: tuple[int, ...]
    bounds: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls,
        page_table: torch.Tensor,
        page_size: int,
        prefix: Sequence[int],
        new: Sequence[int],
        *,
        block_q: int = 128,
        block_k: int = 64,
    ) -> PrefillBatch:
        """Return the batch of requests with ``prefix`` cached and ``new`` tokens each; rows of ``q`` follow
        each other by request.

        Raises:
            ValueError, TypeError: sizes, shapes, dtypes or lengths that do not fit.
        """
        check_page_size(page_size)
        for name, size in (("block_q", block_q), ("block_k", block_k)):
            if size not in BLOCK_SIZES:
                raise ValueError(f"{name} is {size}; expected one of {BLOCK_SIZES}.")
        check("page_table", page_table, torch.int32, (len(new), None))
        if len(prefix) != len(new) or min((*prefix, *new), default=0) < 0:
            raise ValueError(f"prefix {list(prefix)} and new {list(new)} must be as many lengths from 0.")
        longest = max((a + b for a, b in zip(prefix, new, strict=True)), default=0)
        if longest > page_table.shape[1] * page_size:
            raise ValueError(f"{longest} tokens do not fit {page_table.shape[1]} pages of {page_size}.")
        bounds, places, row = [], [], 0
        for request, (cached, fresh) in enumerate(zip(prefix, new, strict=True)):
            bounds.append((cached, cached + fresh, row))
            if fresh:
                blocks = range(cached // block_q, -(-(cached + fresh) // block_q))
                places += [(request, block) for block in blocks]
            row += fresh
        device = page_table.device
        return cls(
            page_table,
            page_size,
            block_q,
            block_k,
            tuple(prefix),
            tuple(new),
            _sent(bounds, 3, device),
            _sent(places, 2, device),
        )

    @property
    def rows(self) -> int:
        """New tokens of all requests."""
        return sum(self.new)

    @property
    def query_blocks(self) -> int:
        return self.places.shape[0]

    @property
    def most_masked(self) -> int:
        """Key blocks of a list that any of its queries sees only a part of, at most."""
        return max(1, self.block_q // self.block_k)

    def spans(self) -> list[range]:
        """Return which query blocks of the batch are whose: a range per request, empty without new tokens."""
        spans, first = [], 0
        for cached, fresh in zip(self.prefix, self.new, strict=True):
            count = -(-(cached + fresh) // self.block_q) - cached // self.block_q if fresh else 0
            spans.append(range(first, first + count))
            first += count
        return spans

    def part(self, requests: range) -> PrefillBatch:
        """Return the batch of some requests that follow each other. Waits for nothing."""
        own, spans = slice(requests.start, requests.stop), self.spans()[requests.start : requests.stop]
        bounds = self.bounds[own].clone()
        bounds[:, 2] -= sum(self.new[: requests.start])
        places = self.places[spans[0].start : spans[-1].stop].clone()
        places[:, 0] -= requests.start
        return replace(
            self,
            page_table=self.page_table[own],
            prefix=self.prefix[own],
            new=self.new[own],
            bounds=bounds,
            places=places,
        )


class BlockLists(NamedTuple):
    """Key blocks of each query block and head. The list of query block t and head h is
    ``blocks[starts[t, h] : starts[t, h] + counts[t, h]]``: distinct numbers, ascending, none past the block
    of the query block's last position. Lists may share entries."""

    blocks: torch.Tensor
    """int32 [entries]"""
    starts: torch.Tensor
    """int32 [query blocks, heads]: query heads, or KV heads whose lists serve their whole query group."""
    counts: torch.Tensor
    """int32, as ``starts``"""


class SplitLists(NamedTuple):
    """Key blocks of the query blocks of one request, by query head, ascending; entries behind a count are
    unspecified. All int32."""

    full_counts: torch.Tensor
    """[heads, query blocks]: blocks that end before the query block begins."""
    full: torch.Tensor
    """[heads, query blocks, key blocks of the request]"""
    masked_counts: torch.Tensor
    """[heads, query blocks]: blocks of the query block's own positions, which each query sees a part of."""
    masked: torch.Tensor
    """[heads, query blocks, max(1, block_q / block_k)]"""


def _sent(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> torch.Tensor:
    values = torch.tensor(rows, dtype=torch.int32).view(-1, width)
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
