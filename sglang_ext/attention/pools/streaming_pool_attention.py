"""Attention where streaming heads have a pool of their own: SGLang's backend of such a server.

A layer takes two launches, one per kind of head: `sparse_prefill` with lists in an extend, `sparse_decode` in
a step. An extend's streaming heads attend in a workspace of one layer that all layers share, with what the
rings hold of the prefix and the new tokens; then the rings take the newest ones. So a prompt's chunk takes no
room of the pool's. Nothing waits for the device, and what steps read lies at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ragserve_kernels.paged import PagedBatch
from ragserve_kernels.sparse_decode import STREAMING, HeadKinds, sparse_decode
from ragserve_kernels.sparse_prefill import BlockLists, PrefillBatch, all_blocks, sparse_prefill
from sglang_ext.attention.pools.streaming_pool import StreamingPlan, StreamingRings
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.versions import tp_group


def window_lists(batch: PrefillBatch, kv_heads: int, sinks: int, local: int) -> BlockLists:
    """Return the lists of the first ``sinks`` pages, each row's own page and ``local`` pages before it.

    ``batch``: its blocks are pages."""
    number = batch.places[:, 1:]
    first = (number - local).clamp_min(sinks)  # of the local ones
    sink = (number + 1).clamp_max(sinks)
    step = torch.arange(sinks + local + 1, dtype=torch.int32, device=number.device)
    blocks = torch.where(step < sink, step, first + step - sink).to(torch.int32)
    start = torch.arange(len(number), dtype=torch.int32, device=number.device)[:, None] * len(step)
    count = sink + (number + 1 - first).clamp_min(0)
    shape = -1, kv_heads
    return BlockLists(
        blocks.flatten(), start.expand(shape).contiguous(), count.to(torch.int32).expand(shape).contiguous()
    )


@dataclass(frozen=True, eq=False)
class _Places:
    """Where an extend's streaming heads read and write: int64, all on the device. ``kept``: of the prefixes,
    slots of the rings and of the workspace. ``new``: slots of the workspace, by row. ``saved``: rows that the
    rings take, and their slots there. ``pages``: of the workspace."""

    kept: tuple[torch.Tensor, torch.Tensor]
    new: torch.Tensor
    saved: tuple[torch.Tensor, torch.Tensor]
    pages: int


@dataclass(frozen=True, eq=False)
class _Extend:
    """The extend at hand: its batch and lists by kind of head, and where its KV goes."""

    batches: tuple[PrefillBatch, PrefillBatch]
    lists: tuple[BlockLists, BlockLists]  # for all heads of a layer
    slots: torch.Tensor
    places: _Places

    def lists_for(self, kind: int, heads: int) -> BlockLists:
        listed = self.lists[kind]
        starts, counts = (part[:, :heads].contiguous() for part in (listed.starts, listed.counts))
        return BlockLists(listed.blocks, starts, counts)


class StreamingPoolBackend(AttentionBackend):
    """Dense attention of the other heads, sinks and local pages for streaming ones, in prefill and decoding.
    Scheduler thread only."""

    def __init__(self, runner: Any, plan: StreamingPlan, rings: StreamingRings) -> None:
        """``runner``: SGLang's model runner, whose pool is an `OtherHeadsPool`."""
        super().__init__()
        self._plan, self._rings, self._pool = plan, rings, runner.token_to_kv_pool
        self._table, self._device = runner.req_to_token_pool.req_to_token, torch.device(runner.device)
        layers, kv_heads = plan.pattern.shape
        group = runner.model_config.num_attention_heads // Ranks(tp_group(runner)).world // kv_heads
        # by layer, for other heads and streaming ones: int64, KV heads and query heads
        self._heads: list[tuple[tuple[torch.Tensor, torch.Tensor], ...]] = []
        for layer in range(layers):
            kinds = []
            for streams in (False, True):
                own = (plan.pattern[layer] == streams).nonzero()[:, 0]
                queries = (own[:, None] * group + torch.arange(group)).flatten()
                kinds.append((own.to(self._device), queries.to(self._device)))
            self._heads.append(tuple(kinds))
        self._kinds = torch.full((kv_heads,), STREAMING, dtype=torch.int32, device=self._device)
        width = -(-self._table.shape[1] // plan.page)
        self._numbers = torch.arange(width, device=self._device)
        # of a step, at fixed addresses; by kind
        self._tables = torch.zeros(2, rings.rows, width, dtype=torch.int32, device=self._device)
        self._lens = torch.zeros(rings.rows, dtype=torch.int32, device=self._device)
        self._newest = torch.zeros(rings.rows, dtype=torch.int64, device=self._device)  # in the rings
        self._extend: _Extend | None = None

    # SGLang's interface

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self._begin_step(forward_batch)
        elif mode.is_extend():
            self._extend = self._begin_extend(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > len(self._lens):
            raise ValueError(f"a graph of {max_bs} requests, and {len(self._lens)} have rings")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return self._device.type != "cpu"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        # a refusal by design: what a model passes beside q, k and v shows at its first pass, the warm-up
        if kwargs or not save_kv_cache or k is None:
            raise NotImplementedError(
                f"layer {layer.layer_id} attends with {', '.join(sorted(kwargs)) or 'KV of its own'}, and a "
                "pool of their own for streaming heads knows plain attention only: serve this model with "
                "decode_heads_pool=shared"
            )
        q = q.reshape(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        k, v = (half.reshape(len(q), layer.tp_k_head_num, layer.qk_head_dim) for half in (k, v))
        attend = self._decode if mode.is_decode() else self._attend
        return attend(layer.layer_id, q, k, v, forward_batch, layer.scaling).flatten(1)

    # steps

    def _begin_step(self, forward_batch: Any) -> None:
        """Set the tables outside of any graph, on the forward's stream.

        The scheduler may write to the request table while a graph runs."""
        n, page = forward_batch.batch_size, self._plan.page
        rows, lens = forward_batch.req_pool_indices[:n], forward_batch.seq_lens[:n]
        lens_cpu = forward_batch.seq_lens_cpu
        width = len(self._numbers)
        if lens_cpu is not None and n:
            width = -(-int(lens_cpu[:n].max()) // page)
        rows = rows.long()
        self._tables[0, :n, :width] = self._table[rows, : width * page : page] // page
        self._tables[1, :n, :width] = self._rings.pages(rows[:, None], self._numbers[:width])
        self._lens[:n] = lens
        last = (lens - 1).clamp_min(0).long()
        self._newest[:n] = self._rings.pages(rows, last // page) * page + last % page

    def _decode(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: Any,
        scale: float,
    ) -> torch.Tensor:
        n, plan = len(q), self._plan
        slots = forward_batch.out_cache_loc[:n], self._newest[:n]
        caches = self._pool.heads(layer), self._rings.heads(layer)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for kind, (own, queries) in enumerate(self._heads[layer]):
            if not len(own):
                continue
            for cache, new in zip(caches[kind], (k, v), strict=True):
                cache[slots[kind]] = new.index_select(1, own)
            heads = None
            if kind:  # a token more: `sparse_decode` counts local tokens from the newest one's page back
                sink, local = plan.sinks * plan.page, plan.local * plan.page + 1
                heads = HeadKinds(self._kinds[: len(own)], sink, local)
            batch = PagedBatch(self._tables[kind, :n], self._lens[:n], plan.page)
            attended = sparse_decode(
                q.index_select(1, queries), caches[kind], batch, heads=heads, scale=scale
            )
            out.index_copy_(1, queries, attended)
        return out

    # extends

    def _begin_extend(self, forward_batch: Any) -> _Extend:
        page, kv_heads = self._plan.page, self._plan.pattern.shape[1]
        prefix, new = list(forward_batch.extend_prefix_lens_cpu), list(forward_batch.extend_seq_lens_cpu)
        rows = forward_batch.req_pool_indices[: len(new)].long()
        longest = max(a + b for a, b in zip(prefix, new, strict=True))
        table = (self._table[:, :longest:page].index_select(0, rows) // page).to(torch.int32)
        places, streaming = self._streaming_places(rows, prefix, new)
        usual = PrefillBatch.of(table, page, prefix, new)
        paged = PrefillBatch.of(streaming, page, prefix, new, block_q=page, block_k=page)
        lists = (
            all_blocks(usual, kv_heads),
            window_lists(paged, kv_heads, self._plan.sinks, self._plan.local),
        )
        return _Extend((usual, paged), lists, forward_batch.out_cache_loc[: usual.rows], places)

    def _streaming_places(
        self, rows: torch.Tensor, prefix: Sequence[int], new: Sequence[int]
    ) -> tuple[_Places, torch.Tensor]:
        """Lay out the workspace. Returns the places, and its page table, int32 [requests, pages]; 0 for pages
        that no row sees."""
        plan = self._plan
        page, offsets = plan.page, torch.arange(plan.page)
        width = max(-(-(a + b) // page) for a, b in zip(prefix, new, strict=True))
        table = torch.zeros(len(new), width, dtype=torch.int64)
        parts: list[tuple[torch.Tensor, ...]] = []
        used = start = 0
        for i, (cached, fresh) in enumerate(zip(prefix, new, strict=True)):
            end, begun = cached + fresh, -(-cached // page)  # pages of the prefix, the last may be partial
            first, pages = cached // page, -(-end // page)
            before = torch.arange(begun)
            before = before[(before < plan.sinks) | (before >= first - plan.local)]
            own = torch.cat((before, torch.arange(begun, pages)))
            table[i, own] = torch.arange(used, used + len(own))
            used += len(own)
            kept = (before[:, None] * page + offsets).flatten()
            kept = kept[kept < cached]
            fresh_ones = torch.arange(cached, end)
            number = fresh_ones // page
            saved = fresh_ones[(number < plan.sinks) | (number >= pages - 1 - plan.local)]
            parts.append(
                (
                    self._in_rings(kept),
                    torch.full_like(kept, i),
                    table[i, kept // page] * page + kept % page,
                    table[i, number] * page + fresh_ones % page,
                    saved - cached + start,
                    self._in_rings(saved),
                    torch.full_like(saved, i),
                )
            )
            start += fresh
        table = self._sent(table.to(torch.int32))
        kept_from, kept_of, kept_to, new_to, saved_rows, saved_to, saved_of = (
            self._sent(torch.cat(part)) for part in zip(*parts, strict=True)
        )
        size = plan.ring * page
        return _Places(
            (kept_from + rows[kept_of] * size, kept_to),
            new_to,
            (saved_rows, saved_to + rows[saved_of] * size),
            used,
        ), table

    def _in_rings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return where tokens of a request lie in its own part of the rings."""
        page = self._plan.page
        return self._rings.pages(torch.zeros_like(tokens), tokens // page) * page + tokens % page

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            return values.pin_memory().to(self._device, non_blocking=True)
        return values.to(self._device)

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: Any,
        scale: float,
    ) -> torch.Tensor:
        """Run one layer of the extend; rows of padding behind the batch's get zero."""
        if self._extend is None:
            raise RuntimeError("an extend that has not begun")
        extend, rows = self._extend, self._extend.batches[0].rows
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[rows:] = 0
        for kind, (own, queries) in enumerate(self._heads[layer]):
            if not len(own):
                continue
            fresh = tuple(half[:rows].index_select(1, own) for half in (k, v))
            if kind:
                keys, values = self._workspace(layer, extend.places, fresh)
            else:
                keys, values = self._pool.heads(layer)
                keys[extend.slots], values[extend.slots] = fresh
            lists, batch = extend.lists_for(kind, len(own)), extend.batches[kind]
            asked = q[:rows].index_select(1, queries)
            attended = sparse_prefill(asked, keys, values, batch, lists, scale=scale)
            out[:rows].index_copy_(1, queries, attended)
            if kind:
                saved, slots = extend.places.saved
                for ring, half in zip(self._rings.heads(layer), fresh, strict=True):
                    ring[slots] = half[saved]
        return out

    def _workspace(
        self, layer: int, places: _Places, fresh: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the workspace: what an extend sees of a layer's streaming heads' K and V."""
        halves = []
        for ring, half in zip(self._rings.heads(layer), fresh, strict=True):
            # what is never written is never unmasked either, but must not be NaN
            space = half.new_zeros(places.pages * self._plan.page, *half.shape[1:])
            space[places.kept[1]] = ring[places.kept[0]]
            space[places.new] = half
            halves.append(space)
        return halves[0], halves[1]
