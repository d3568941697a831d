"""Random paged batches for the decode operations.

Slots without a token of the batch hold NaN; table entries without a page hold garbage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragserve_kernels.paged import KV, KVPair, PagedBatch, PageSelection
from ragserve_kernels.quantize_kv import QuantizedKV, dequantize_kv, quantize_kv
from tests.kernels.reference import attention64


@dataclass
class Batch:
    """Decode batch of a layer; ``k`` and ``v`` are what the operations get, plain or quantised."""

    q: torch.Tensor
    k: KV
    v: KV
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int

    @property
    def kv(self) -> KVPair:
        return self.k, self.v

    def paged(self, block_size: int = 0) -> PagedBatch:
        return PagedBatch(self.page_table, self.seq_lens, self.page_size, block_size)

    def inputs(self, block_size: int = 0) -> tuple[torch.Tensor, KVPair, PagedBatch]:
        """The first arguments of the operations; a block is a page by default."""
        return self.q, self.kv, self.paged(block_size)

    def slots(self, request: int, tokens: torch.Tensor) -> torch.Tensor:
        """Pool slots of the tokens at these positions."""
        tokens = tokens.to(self.page_table.device)
        return (
            self.page_table[request, tokens // self.page_size].long() * self.page_size
            + tokens % self.page_size
        )

    def values(self, cache: KV, request: int, tokens: torch.Tensor) -> torch.Tensor:
        slots = self.slots(request, tokens)
        return dequantize_kv(cache, slots) if isinstance(cache, QuantizedKV) else cache[slots]

    def attend(self, request: int, kv_head: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact attention of one query group: float64 out [group, head_dim], weights [group, tokens]."""
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[request : request + 1, kv_head * group : (kv_head + 1) * group]
        k, v = (self.values(cache, request, tokens)[:, kv_head : kv_head + 1] for cache in (self.k, self.v))
        out, weights = attention64(q, k, v)
        return out[0], weights[:, 0]

    def tokens(self, request: int, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
        """Positions of the tokens of ``blocks``, in their order."""
        tokens = (blocks.cpu().long()[:, None] * block_size + torch.arange(block_size)).flatten()
        return tokens[tokens < int(self.seq_lens[request])]

    def forget(self, request: int, kv_head: int, blocks: torch.Tensor, block_size: int) -> None:
        """Fill the K and V of one head's ``blocks`` with NaN: reading them shows."""
        slots = self.slots(request, self.tokens(request, blocks, block_size))
        for cache in (self.k, self.v):
            if isinstance(cache, QuantizedKV):
                cache.params[slots, kv_head] = math.nan
            else:
                cache[slots, kv_head] = math.nan


def make_batch(
    lens: Sequence[int],
    *,
    device: torch.device,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    bits: int = 0,
    peak: float = 1.0,
) -> Batch:
    """``peak`` scales the queries: 1 makes attention nearly flat, with 8 a few tokens hold most of it."""
    max_pages = max(1, max(-(-n // page_size) for n in lens)) + 1
    used = sum(-(-n // page_size) for n in lens)
    pages = torch.randperm(used + 3)[:used].to(torch.int32)
    table = torch.full((len(lens), max_pages), 2**30, dtype=torch.int32)
    live = []
    at = 0
    for i, n in enumerate(lens):
        count = -(-n // page_size)
        table[i, :count] = pages[at : at + count]
        positions = torch.arange(n)
        live.append(table[i, positions // page_size].long() * page_size + positions % page_size)
        at += count
    slots = torch.cat(live)
    size = (used + 3) * page_size
    caches: list[KV] = []
    for _ in range(2):
        x = torch.randn(len(slots), kv_heads, head_dim, dtype=dtype).to(device)
        if bits:
            cache = QuantizedKV.empty(size, kv_heads, head_dim, bits=bits, device=device)
            cache.codes.fill_(77)
            cache.params.fill_(math.nan)
            quantize_kv(x, slots.to(device), cache)
            caches.append(cache)
        else:
            plain = torch.full((size, kv_heads, head_dim), math.nan, dtype=dtype, device=device)
            plain[slots.to(device)] = x
            caches.append(plain)
    q = (peak * torch.randn(len(lens), heads, head_dim)).to(dtype).to(device)
    return Batch(
        q,
        caches[0],
        caches[1],
        table.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        page_size,
    )


def random_index(batch: Batch, block_size: int, share: float) -> PageSelection:
    """A shuffled ``share`` of every head's blocks, at least one; garbage past the counts."""
    lens = batch.seq_lens.tolist()
    kv_heads = batch.k.shape[1]
    totals = [-(-n // block_size) for n in lens]
    index = torch.full((len(lens), kv_heads, max(1, *totals)), 2**30, dtype=torch.int32)
    counts = torch.zeros(len(lens), kv_heads, dtype=torch.int32)
    for b, total in enumerate(totals):
        for h in range(kv_heads):
            n = min(total, max(1, round(total * share)))
            index[b, h, :n] = torch.randperm(total)[:n]
            counts[b, h] = n
    return PageSelection(index.to(batch.q.device), counts.to(batch.q.device))
