"""Attention over `TwoCaches`, by kind of head: extends by `sparse_prefill`, steps by `sparse_decode`.

A layer takes two launches, one per kind, for its heads of a kind lie side by side. Nothing waits for the
device in a layer, and what steps read lies at fixed addresses, as CUDA graphs need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ragserve_kernels.paged import PagedBatch
from ragserve_kernels.sparse_decode import STREAMING, HeadKinds, sparse_decode
from ragserve_kernels.sparse_prefill import BlockLists, PrefillBatch, all_blocks, sparse_prefill
from sglang_ext.attention.streaming_pool_attention import window_lists
from sglang_ext.attention.two_caches import TwoCaches


class TwoCacheAttention:
    """Writes K and V of new tokens and attends with their queries. One thread only."""

    def __init__(self, caches: TwoCaches, query_heads: int) -> None:
        """``query_heads``: of a layer, a multiple of its KV heads."""
        self._caches = caches
        layers, kv_heads = caches.streaming.shape
        device, group = caches.table.device, query_heads // kv_heads
        requests, width = len(caches.table), -(-caches.table.shape[1] // caches.page)
        # by layer, for heads that see everything and for streaming ones: int64, KV heads and query heads
        self._heads: list[tuple[tuple[torch.Tensor, torch.Tensor], ...]] = []
        for layer in range(layers):
            kinds = []
            for streaming in (False, True):
                own = (caches.streaming[layer] == streaming).nonzero()[:, 0]
                queries = (own[:, None] * group + torch.arange(group)).flatten()
                kinds.append((own.to(device), queries.to(device)))
            self._heads.append(tuple(kinds))
        self._kinds = torch.full((kv_heads,), STREAMING, dtype=torch.int32, device=device)
        # of a step, at fixed addresses; by kind
        self._tables = torch.zeros(2, requests, width, dtype=torch.int32, device=device)
        self._newest = torch.zeros(2, requests, dtype=torch.int64, device=device)
        self._lens = torch.zeros(requests, dtype=torch.int32, device=device)
        # of an extend; by kind
        self._extends: tuple[PrefillBatch, PrefillBatch] | None = None
        self._lists: tuple[BlockLists, BlockLists] | None = None
        self._written: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin_extend(self, new: Mapping[int, int]) -> None:
        """Prepare the extend whose slots `TwoCaches.extend` has just taken. A prefix's released pages are not
        read; no page that a new token sees may be released before the extend has run."""
        caches, page = self._caches, self._caches.page
        rows, counts = list(new), list(new.values())
        prefix = [caches.tokens[row] - n for row, n in new.items()]
        picked = torch.tensor(rows, device=caches.table.device)
        longest = max(caches.tokens[row] for row in rows)
        places = caches.slots(picked, slice(0, longest, page))
        full, streaming = ((slots // page).to(torch.int32) for slots in places)
        # block sizes of the usual extend, and pages
        usual = PrefillBatch.of(full, page, prefix, counts)
        paged = PrefillBatch.of(streaming, page, prefix, counts, block_q=page, block_k=page)
        self._extends = usual, paged
        kv_heads = caches.streaming.shape[1]
        sinks, local = caches.sink // page, caches.local // page
        self._lists = all_blocks(usual, kv_heads), window_lists(paged, kv_heads, sinks, local)
        spans = [
            caches.slots(picked[i : i + 1], slice(start, start + n))
            for i, (start, n) in enumerate(zip(prefix, counts, strict=True))
        ]
        full_slots, streaming_slots = (torch.cat(kind, 1)[0] for kind in zip(*spans, strict=True))
        self._written = full_slots, streaming_slots

    def extend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Run one layer of the extend: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], by
        request. Returns as q."""
        if self._extends is None or self._lists is None or self._written is None:
            raise RuntimeError("an extend that has not begun")
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for kind, (own, queries) in enumerate(self._heads[layer]):
            if not len(own):
                continue
            keys, values = self._write(layer, kind, self._written[kind], k, v)
            listed = self._lists[kind]
            lists = BlockLists(
                listed.blocks,
                *(part[:, : len(own)].contiguous() for part in (listed.starts, listed.counts)),
            )
            asked = q.index_select(1, queries)
            attended = sparse_prefill(asked, keys, values, self._extends[kind], lists, scale=scale)
            out.index_copy_(1, queries, attended)
        return out

    def begin_decode(self, rows: Sequence[int]) -> None:
        """Prepare a step, outside of any graph; `TwoCaches.extend` has taken a slot for each request."""
        caches, n = self._caches, len(rows)
        device = caches.table.device
        lens = [caches.tokens[row] for row in rows]
        picked = torch.tensor(rows, device=device)
        places = caches.slots(picked, slice(0, max(lens), caches.page))
        self._lens[:n] = torch.tensor(lens, dtype=torch.int32, device=device)
        newest = caches.table[picked, torch.tensor(lens, device=device) - 1]
        written = newest, caches.allocator.full_to_swa_index_mapping[newest]
        for kind in range(2):
            self._tables[kind, :n, : places[kind].shape[1]] = places[kind] // caches.page
            self._newest[kind, :n] = written[kind]

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Run one layer of the step: q [requests, heads, head_dim], k and v [requests, kv_heads, head_dim] of
        the newest tokens. Returns as q."""
        n, caches = len(q), self._caches
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for kind, (own, queries) in enumerate(self._heads[layer]):
            if not len(own):
                continue
            kv = self._write(layer, kind, self._newest[kind, :n], k, v)
            # the newest token's own page and those before it: `TwoCaches` counts from the page's first token
            heads = HeadKinds(self._kinds[: len(own)], caches.sink, caches.local + 1) if kind else None
            batch = PagedBatch(self._tables[kind, :n], self._lens[:n], caches.page)
            attended = sparse_decode(q.index_select(1, queries), kv, batch, heads=heads, scale=scale)
            out.index_copy_(1, queries, attended)
        return out

    def _write(
        self, layer: int, kind: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the heads' K and V to their slots. Returns their caches."""
        own, _ = self._heads[layer][kind]
        caches = self._caches.heads(layer, streaming=bool(kind))
        for cache, new in zip(caches, (k, v), strict=True):
            cache[slots] = new.index_select(1, own)
        return caches
