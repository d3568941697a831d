"""The attention backend: prefill and dense steps run in the wrapped backend, sparse ones read chosen pages.
An extend with sparse prefill runs in `sparse_prefill`.

A step runs as one of the variants of `step_planner.Variant`, each a CUDA graph of its own where graphs are
on, so that a batch without sparse rows costs what it costs without us. In the other variants all rows go
through our kernels, the dense ones with all of their pages."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ragserve_kernels.page_select import KeySummary, page_select
from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection
from ragserve_kernels.sparse_decode import HeadKinds, sparse_decode
from sglang_ext.attention.decode.decode_state import DecodeState
from sglang_ext.attention.decode.page_stats import PageStatistics
from sglang_ext.attention.decode.progressive_attention import ProgressiveAttention
from sglang_ext.attention.decode.prompt_queries import PromptQueries
from sglang_ext.attention.decode.step_planner import FORCED_PAGES, IDLE, Step, Variant
from sglang_ext.attention.decode.tables import StepTables, TableRows, TableShape
from sglang_ext.attention.pools.quantized_pool import QuantizedKVPool
from sglang_ext.attention.pools.streaming_heads import load_pattern
from sglang_ext.attention.prefill.hopper_prefill import HopperPrefill
from sglang_ext.attention.prefill.sparse_prefill import SparsePrefill
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.versions import tp_group
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DecodeOptions

_CHOOSING = (Variant.SELECTED, Variant.REFRESHED, Variant.PROGRESSIVE)  # steps in which rows may choose pages
_SCORE_BYTES = 2**25  # of the page scores: a launch chooses for as many layers as fit


class SparseDecodeBackend(AttentionBackend):
    """Wraps the backend that SGLang would have used. One per scheduler process; scheduler thread only."""

    def __init__(
        self,
        wrapped: Any,
        runner: Any,
        config: AttentionConfig,
        statistics: PageStatistics,
        host: torch.Tensor | None = None,
    ) -> None:
        """``host``: host pages of requests, as `ProgressiveAttention.host`."""
        self.wrapped = wrapped
        super().__init__()
        self.config = config
        self._statistics = statistics
        pool = self._pool = runner.token_to_kv_pool
        self.quantized = isinstance(pool, QuantizedKVPool)
        self._table = runner.req_to_token_pool.req_to_token
        self._device = torch.device(runner.device)
        ranks, page = Ranks(tp_group(runner)), runner.page_size
        self.rank = ranks.rank
        self._pattern: torch.Tensor | None = None
        if config.heads is not None:
            pattern = load_pattern(
                config.heads, pool.layer_num, pool.head_num, rank=ranks.rank, world=ranks.world
            )
            self._pattern = pattern.to(self._device)
        # of this rank's heads
        self.streaming_share = 0.0 if self._pattern is None else float(self._pattern.float().mean())
        self.dense_share = len(config.dense_layers) / pool.layer_num
        pages = -(-self._table.shape[1] // page)
        self.shape = TableShape(
            layers=pool.layer_num,
            heads=runner.model_config.num_attention_heads // ranks.world,
            kv_heads=pool.head_num,
            pages=pages,
            capacity=min(max(FORCED_PAGES, config.max_budget // page) + 1, pages),
            page_size=page,
            head_dim=pool.head_dim,
            dtype=pool.dtype,
            lags=config.offload_bytes > 0,
            pool_pages=statistics.tables.k_center.shape[1] - statistics.tables.more,
            dense_layers=tuple(config.dense_layers),
        )
        self.progressive = ProgressiveAttention(config, statistics, host)
        # int32 [requests, pages]: see `StepTables.set_lengths`
        self.offloaded_statistics: torch.Tensor | None = None
        self._captured: StepTables | None = None  # at the addresses that graphs read
        self._eager: StepTables | None = None  # for batches larger than any graph, or without graphs
        self._tables: StepTables | None = None  # of the latest decode pass that runs our kernels
        self._step = IDLE
        self._asked = PromptQueries(self.shape, self._device)
        self._prefixes: torch.Tensor | None = None  # slots that the extend at hand reads and does not write
        self._attend_prefill = HopperPrefill(self._device)
        self.prefill: SparsePrefill | None = None  # of the extend at hand, if some request's is sparse

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped backend's attribute: SGLang looks for more than the base class has."""
        if name == "wrapped":  # not set yet: copying, unpickling
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    @property
    def variant(self) -> Variant:
        """Variant of the next forward pass, if it is a decode step."""
        return self._step.variant

    @property
    def graph_size(self) -> int:
        """Requests of the largest captured batch; 0 without CUDA graphs."""
        return 0 if self._captured is None else self._captured.size

    def begin(self, step: Step) -> None:
        """Prepare the next forward pass; IDLE: it has been launched."""
        self._step = step
        self._asked.begin(step.asked)
        self._prefixes = None
        if self.quantized:
            cached = [self._table[row, :tokens] for row, tokens in step.prefixes if tokens]
            self._prefixes = torch.cat(cached).long() if cached else None
        self.prefill = None
        if step.prefill:
            page, pattern = self.shape.page_size, self._pattern
            self.prefill = SparsePrefill(
                step.prefill, self._table, page, self.config, pattern, self._attend_prefill
            )
        if step.rows and not self._is_wrapped(decode=True):
            self._tables_for(len(step.rows)).set_step(step)

    def choose(self, queries: torch.Tensor, batch: PagedBatch, options: DecodeOptions) -> PageSelection:
        """Choose pages of one request outside of a decode step, in all layers.

        ``queries`` [layers, heads, head_dim]; ``batch``: where the statistics of its pages lie. Returns
        [layers, kv_heads, capacity] and [layers, kv_heads], as `taken`."""
        budgets = torch.tensor([self._limit(options)], dtype=torch.int32).to(self._device, non_blocking=True)
        width, capacity = batch.page_table.shape[1], self.shape.capacity
        sizes = self.shape.layers, 1, self.shape.kv_heads
        blocks = torch.zeros(*sizes, capacity, dtype=torch.int32, device=self._device)
        counts = torch.zeros(sizes, dtype=torch.int32, device=self._device)
        at_once = max(1, _SCORE_BYTES // (4 * self.shape.kv_heads * width))
        for first in range(0, self.shape.layers, at_once):
            layers = slice(first, first + at_once)
            page_select(
                queries[layers, None],
                batch,
                self._statistics.tables.bounds(layers),
                budget_tokens=capacity * self.shape.page_size,
                budgets=budgets,
                into=PageSelection(blocks[layers], counts[layers]),
            )
        return PageSelection(blocks[:, 0], counts[:, 0])

    def _limit(self, options: DecodeOptions) -> int:
        return min(options.budget // self.shape.page_size, self.shape.capacity - 1)

    def widened(self, selection: PageSelection, state: DecodeState) -> PageSelection:
        """Return a selection with the page that has begun since, if one has, as `place` would put it."""
        if not state.selection.widened:
            return selection
        blocks, counts, count = selection.blocks.clone(), selection.counts, self._limit(state.options)
        blocks[..., count] = state.selection.newest
        return PageSelection(blocks, torch.full_like(counts, count + 1))

    def place(self, row: int, selection: PageSelection, opened: int | None) -> None:
        """Let a row of the step at hand read these pages: see `StepTables.place`."""
        self._tables_for(len(self._step.rows)).place(row, selection, opened)

    def taken(self, row: int, *, wanted: bool) -> PageSelection:
        """Return what a row of the step just launched reads or has chosen: see `StepTables.taken`."""
        return self._tables_for(len(self._step.rows)).taken(row, wanted=wanted)

    def listed(self, row: int) -> PageSelection:
        """Return the pages for shared blocks of a progressive row of the step just launched: see `listed`."""
        pages = -(-self._step.rows[row].tokens // self.shape.page_size)
        return self._tables_for(len(self._step.rows)).listed(row, pages)

    @property
    def capacity(self) -> int:
        """Pages of the widest selection."""
        return self.shape.capacity

    def observed(self, row: int) -> torch.Tensor:
        """Return a copy of what a row of the latest decode step is to choose pages by.

        [layers, heads, head_dim]."""
        if self._tables is None:
            raise RuntimeError("there was no decode step that chooses pages")
        with self._statistics.on_forward_stream():
            return self._tables.queries[:, row].clone()

    def progressive_use(self, n: int) -> torch.Tensor:
        """Return what the rows of the step just launched read by threshold, float [3, n] on the device.

        Pages and weight, means over heads, and the pages of KV heads that were read from the host."""
        rows = self._tables_for(n).rows(n)
        reads = rows.from_host.sum((0, 2)).float()
        return torch.stack((rows.used.float().mean((0, 2)), rows.weight.mean((0, 2)), reads))

    def _is_wrapped(self, decode: bool) -> bool:
        """Return True if the wrapped backend runs this pass.

        It runs every extend, and dense decode steps where it can read the pool."""
        return not decode or (self.variant is Variant.DENSE and not self.quantized)

    def _tables_for(self, n: int) -> StepTables:
        if self._captured is not None and n <= self._captured.size:
            return self._captured
        if self._eager is None or self._eager.size < n:
            larger = StepTables(max(n, 8), self.shape, self._device, self._pattern)
            if self._eager is not None:
                larger.adopt(self._eager)
            if self._step.rows and self._tables is not None:  # a batch padded beyond its requests
                larger.set_rows(self._step.rows, tuple(range(len(self._step.rows))))
                larger.set_active(self._step)
                larger.set_shares(self._step.shares)
                larger.set_lagged(self._step)
            self._eager = larger
        return self._eager

    # SGLang's interface

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if self._is_wrapped(forward_batch.forward_mode.is_decode()):
            self.wrapped.init_forward_metadata(forward_batch)
        self._before_forward(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if self._is_wrapped(forward_batch.forward_mode.is_decode()):
            self.wrapped.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._before_forward(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if self._is_wrapped(forward_batch.forward_mode.is_decode()):
            self.wrapped.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.wrapped.init_cuda_graph_state(max_bs, max_num_tokens)
        self._captured = StepTables(max_bs, self.shape, self._device, self._pattern)

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
        decode = forward_batch.forward_mode.is_decode()
        # a refusal by design of models with a fused KV write; they show at their first step, the warm-up
        if self.quantized and not save_kv_cache:
            raise NotImplementedError(
                f"layer {layer.layer_id} writes its KV by itself, past a pool of few bits: serve this model "
                "with kv_bits=16"
            )
        if self._is_wrapped(decode):
            if self._prefixes is not None and not decode:
                self._pool.prepare(layer.layer_id, self._prefixes)
            if not decode:
                self._asked.observe(q, layer.layer_id)
            if self.prefill is not None and not decode:
                return self._sparse_extend(
                    self.prefill, q, k, v, layer, forward_batch, save_kv_cache, **kwargs
                )
            if self.quantized and k is not None:
                # some backends read new rows there, not in the pool
                k, v = self._pool.written(layer, forward_batch.out_cache_loc, k, v)
                save_kv_cache = False
            out: torch.Tensor = self.wrapped.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            if self._step.apart and not decode:
                self._attend_apart(q, out, layer)
            return out
        return self._sparse(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    # the step itself

    def _before_forward(self, forward_batch: Any) -> None:
        """Set the tables outside of any graph, on the forward's stream.

        The scheduler may write to the request table while a graph runs."""
        if not forward_batch.forward_mode.is_decode():
            return
        n = forward_batch.batch_size
        rows, lens = forward_batch.req_pool_indices[:n], forward_batch.seq_lens[:n]
        lens_cpu = forward_batch.seq_lens_cpu
        self._statistics.before_decode(rows, lens, lens_cpu)
        if not self._is_wrapped(decode=True):
            self._tables = self._tables_for(n)
            longest = None if lens_cpu is None else int(lens_cpu[:n].max())
            placed = any(row.progressive and row.lag for row in self._step.rows)
            offloaded = self.offloaded_statistics if placed or any(self._step.lagged) else None
            self._tables.set_lengths(self._table, rows, lens, longest, offloaded)

    def _sparse_extend(
        self,
        prefill: SparsePrefill,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one layer of an extend with sparse prefill: q [tokens, heads * head_dim]."""
        if kwargs:  # a refusal by design: only a pass shows what a model's layers ask for
            raise NotImplementedError(
                f"layer {layer.layer_id} attends with {', '.join(sorted(kwargs))}, and sparse prefill knows "
                "plain attention only: omit prefill"
            )
        number, pool = layer.layer_id, self._pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        q = q.reshape(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(number), pool.get_value_buffer(number)
        return prefill.attend(q, keys, values, layer.scaling).flatten(1)

    def _sparse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one layer of a decode step; inside the graph where there is one.

        q [batch, heads * head_dim]; k, v [batch, kv_heads, head_dim] of the newest tokens."""
        # a refusal by design: what a model passes beside q, k and v shows at its first step, the warm-up
        if self._tables is None or kwargs:
            raise NotImplementedError(
                f"layer {layer.layer_id} attends with {', '.join(sorted(kwargs)) or 'no tables'}, and sparse "
                "decoding knows plain attention only: serve this model with sparse_attention=off"
            )
        n, number, pool = q.shape[0], layer.layer_id, self._pool
        rows = self._tables.rows(n)
        q = q.reshape(n, layer.tp_q_head_num, layer.qk_head_dim)
        kv: KVPair
        if self.quantized:
            pool.store(number, forward_batch.out_cache_loc, k, v)
            kv = pool.quantized(number)
        else:
            if save_kv_cache and k is not None:
                pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
            kv = pool.get_key_buffer(number), pool.get_value_buffer(number)
        rows.queries[number].lerp_(q, rows.shares)
        if self.variant in (Variant.SELECTED, Variant.PROGRESSIVE):
            self._choose(rows, slice(number, number + 1))
        for_later = self.variant is Variant.REFRESHED or (self.shape.lags and self.variant in _CHOOSING)
        out = sparse_decode(
            q,
            kv,
            rows.batch,
            selection=rows.selection(number),
            heads=HeadKinds(rows.kinds[number], self.config.sink_tokens, self.config.local_tokens),
            scale=layer.scaling,
        )
        if self.variant is Variant.PROGRESSIVE:
            self._add_progressive(out, rows, q, kv, number, layer.scaling)
        if for_later and number == self.shape.layers - 1:
            self._select_lagged(rows, n)
        return out.view(n, -1)

    def _attend_apart(self, q: torch.Tensor, out: torch.Tensor, layer: Any) -> None:
        """Overwrite what tokens got that attend apart: in the request table their prompt is not there."""
        number = layer.layer_id
        kv = self._pool.get_key_buffer(number), self._pool.get_value_buffer(number)
        shape = -1, layer.tp_q_head_num, layer.qk_head_dim
        for part in self._step.apart:
            part.attend(q.view(shape), out.view(shape), kv, number, layer.scaling)

    def _select_lagged(self, rows: TableRows, n: int) -> None:
        """Choose pages for the steps that follow, in all layers, by what has been observed so far."""
        at_once = max(1, _SCORE_BYTES // (4 * n * self.shape.kv_heads * self.shape.pages))
        for first in range(0, self.shape.layers, at_once):
            layers = slice(first, first + at_once)
            if self.variant is Variant.REFRESHED:
                self._choose(rows, layers)
            if self.shape.lags:
                bounds = self._statistics.tables.bounds(layers)
                into = rows.wanted_selection(layers)
                self._select(rows, layers, rows.scored, bounds, rows.lagged, into)

    def _choose(self, rows: TableRows, layers: slice) -> None:
        """Choose the pages of the active rows: by their bounds, or by the keys themselves, layer by layer.

        A graph is captured without rows, and serves rows of both kinds."""
        bounds = self._statistics.tables.bounds(layers)
        self._select(rows, layers, rows.batch, bounds, rows.active, rows.selection(layers))
        if self.quantized or (self._step.rows and not any(row.exact for row in self._step.rows)):
            return
        for layer in range(self.shape.layers)[layers]:
            one = slice(layer, layer + 1)
            keys = KeySummary(self._pool.get_key_buffer(layer)[None], None, self.shape.page_size)
            self._select(rows, one, rows.batch, keys, rows.exact, rows.selection(one))

    def _select(
        self,
        rows: TableRows,
        layers: slice,
        batch: PagedBatch,
        keys: KeySummary,
        active: torch.Tensor,
        into: PageSelection,
    ) -> None:
        page_select(
            rows.queries[layers],
            batch,
            keys,
            budget_tokens=self.shape.capacity * self.shape.page_size,
            budgets=rows.budgets,
            active=active,
            into=into,
        )

    def _places(self, rows: TableRows) -> torch.Tensor:
        return rows.places[:, None].expand(-1, self.shape.kv_heads, -1)

    def _add_progressive(
        self, out: torch.Tensor, rows: TableRows, q: torch.Tensor, kv: KVPair, layer: int, scale: float
    ) -> None:
        """Add the progressive heads to ``out``, where they are zero: their rows have no chosen pages."""
        ranking, part = self.progressive.attend(
            *(q, kv, rows.ranked, rows.ranked_scored, layer),
            threshold=rows.thresholds,
            scale=scale,
            is_ranked=rows.by_rank[layer],
            places=None if self.progressive.host is None else self._places(rows),
        )
        rows.used[layer].copy_(part.blocks_used)
        rows.weight[layer].copy_(part.weight)
        if part.from_host is not None:
            rows.from_host[layer].copy_(part.from_host)
            # rows that choose by bounds at the end of the step overwrite it
            rows.wanted[layer].copy_(ranking.blocks[..., : self.shape.capacity])
        out += part.out


def _of_wrapped(name: str) -> property:
    return property(
        lambda backend: getattr(backend.wrapped, name),
        lambda backend, value: setattr(backend.wrapped, name, value),
    )


for _name in dir(AttentionBackend):  # what the base class has, `__getattr__` never sees
    if not _name.startswith("_") and _name not in vars(SparseDecodeBackend):
        setattr(SparseDecodeBackend, _name, _of_wrapped(_name))
