"""Random extend batches and lists of key blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.sparse_prefill import (
    BlockLists,
    PrefillBatch,
    all_blocks,
    lists_of,
    mask_of,
    sparse_prefill,
)
from tests.kernels.reference import poisoned


@dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: PrefillBatch

    def attend(self, lists: BlockLists) -> torch.Tensor:
        out = poisoned(*self.q.shape, dtype=self.q.dtype, device=self.q.device)
        assert sparse_prefill(self.q, self.k, self.v, self.batch, lists, out=out) is out
        return out


def make(
    device: torch.device,
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    page: int = 16,
    blocks: tuple[int, int] = (32, 16),
) -> Case:
    """``requests``: (prefix, new tokens) each. Slots without a token are NaN."""
    lengths = [prefix + new for prefix, new in requests]
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages) + 2).to(torch.int32)
    table = torch.full((len(requests), max(pages) + 1), 2**30, dtype=torch.int32)
    k, v = (poisoned(len(order) * page, heads[1], head_dim, dtype=dtype, device=device) for _ in "kv")
    used = 0
    for i, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        table[i, :count] = order[used : used + count]
        used += count
        token = torch.arange(length)
        slots = (table[i, token // page].long() * page + token % page).to(device)
        for side in (k, v):
            side[slots] = torch.randn(length, heads[1], head_dim, device=device).to(dtype)
    prefix, new = zip(*requests, strict=True)
    batch = PrefillBatch.of(table.to(device), page, prefix, new, block_q=blocks[0], block_k=blocks[1])
    q = torch.randn(batch.rows, heads[0], head_dim, device=device).to(dtype)
    return Case(q, k, v, batch)


def random_lists(case: Case, heads: int, share: float) -> BlockLists:
    """A share of the blocks that each query block may list, none for some of them."""
    blocks = int(max(a + b for a, b in zip(case.batch.prefix, case.batch.new, strict=True)))
    possible = mask_of(all_blocks(case.batch, heads), -(-blocks // case.batch.block_k))
    return lists_of(possible & (torch.rand(possible.shape, device=possible.device) < share))
