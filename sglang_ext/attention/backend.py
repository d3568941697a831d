"""The attention backend: prefill and dense decode steps are the wrapped backend's, sparse decode steps read
chosen pages only.

A step runs as one of four variants (`requests.Variant`), each a CUDA graph of its own where graphs are on, so
that a batch in which nobody is sparse costs what it costs without us. In the other variants all rows go
through our kernels, the dense ones with all of their pages."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ragserve_kernels.page_select import PageSelection, page_select
from ragserve_kernels.paged import KV
from ragserve_kernels.progressive_decode import progressive_decode
from ragserve_kernels.sparse_decode import sparse_decode
from sglang_ext.attention.config import AttentionConfig
from sglang_ext.attention.page_stats import Statistics
from sglang_ext.attention.quantized_pool import QuantizedKVPool
from sglang_ext.attention.step_planner import FORCED_PAGES, Step, StepPlanner, Variant
from sglang_ext.attention.streaming_heads import load_pattern
from sglang_ext.attention.tables import StepTables, TableShape

log = logging.getLogger(__name__)

_SCORE_BYTES = 2**25  # of the scores of several layers: as many are chosen for in one launch as fit


def _statistics(pool: Any, table: torch.Tensor, page: int, logical_page: int) -> Statistics:
    try:
        return Statistics(pool, table, page, logical_page)
    except torch.OutOfMemoryError as error:
        share = 1 / logical_page + 1 / (2 * page)
        raise RuntimeError(
            f"no room for the page statistics of sparse decoding, {share:.1%} of the KV pool beside it: lower mem_fraction_static or "
            f"max_total_tokens ({error})"
        ) from error


class SparseDecodeBackend(AttentionBackend):
    """Around the backend that SGLang would have used. One per scheduler process; all calls on the scheduler's
    thread.
    """

    def __init__(self, wrapped: Any, runner: Any, config: AttentionConfig) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.config = config
        for name in (
            "needs_cpu_seq_lens",
            "supports_ragged_verify_graph",
            "use_captured_forward_metadata_for_breakable_cuda_graph",
        ):
            setattr(self, name, getattr(wrapped, name))
        pool = self._pool = runner.token_to_kv_pool
        self._table = runner.req_to_token_pool.req_to_token
        self._page = runner.page_size
        self._device = torch.device(runner.device)
        self.planner = StepPlanner(config, self._page, runner.model_config.context_len)
        self.planner.check(config.options)
        group = runner.tp_group
        self.rank = int(group.rank_in_group)
        pattern = (
            None
            if config.heads is None
            else load_pattern(
                config.heads, pool.layer_num, pool.head_num, rank=group.rank_in_group, world=group.world_size
            )
        )
        heads = runner.model_config.num_attention_heads // group.world_size
        capacity = max(FORCED_PAGES, config.max_budget // self._page) + 1
        pages = -(-self._table.shape[1] // self._page)
        self._shape = TableShape(
            pool.layer_num,
            heads,
            pool.head_num,
            pages,
            min(capacity, pages),
            self._page,
            pool.head_dim,
            pool.dtype,
        )
        self.statistics = _statistics(pool, self._table, self._page, config.logical_page)
        log.info("page statistics take %.1f MiB", self.statistics.bytes / 2**20)
        self._pattern = None if pattern is None else pattern.to(self._device)
        self._captured: StepTables | None = None  # at the addresses that graphs read
        self._eager: StepTables | None = None  # for batches larger than any graph, or without graphs
        self._tables: StepTables | None = None  # of the step at hand
        self._seated: StepTables | None = None  # where the pages chosen so far are
        self.variant = Variant.DENSE
        self._step: Step | None = None
        self._quantized = isinstance(pool, QuantizedKVPool)
        self._prefixes: torch.Tensor | None = None  # slots that the extend at hand reads and does not write
        self.streaming_share = (
            0.0 if pattern is None else float(pattern.float().mean())
        )  # of this rank's heads

    def __getattr__(self, name: str) -> Any:
        """What SGLang looks for beyond the base class is the wrapped backend's."""
        if name == "wrapped":  # not set yet: copying, unpickling
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    # what a step is

    def seat(self, n: int) -> None:
        """A decode step of ``n`` requests is to be planned: in the graphs' tables, or in the others, no page
        is chosen yet.
        """
        if self._seated is None or (self._seated is self._captured) != self._fits_graph(n):
            self.planner.forget()

    def begin(self, step: Step) -> None:
        """The next forward is this decode step."""
        self._step, self.variant = step, step.variant
        if self._is_wrapped(decode=True):
            return
        tables = self._seated = self._tables_for(len(step.rows))
        if step.changed:
            tables.set_rows(step.rows, step.kept)
        tables.open_pages({i: row.state.newest for i, row in enumerate(step.rows) if step.opened[i]})
        tables.set_active(step.active)

    def begin_extend(self, prefixes: Iterable[tuple[int, int]]) -> None:
        """The next forward is an extend: per request its row, and how many tokens of it are in the pool
        already.
        """
        held = [self._table[row, :tokens] for row, tokens in prefixes if tokens]
        self._prefixes = torch.cat(held).long() if held and self._quantized else None

    def end(self) -> None:
        """The forward has been launched."""
        self._step, self.variant, self._prefixes = None, Variant.DENSE, None

    def _is_wrapped(self, decode: bool) -> bool:
        """Whether the wrapped backend does this pass: every extend, and dense decode steps where it can read
        the pool.
        """
        return not decode or (self.variant is Variant.DENSE and not self._quantized)

    def progressive_use(self, n: int) -> torch.Tensor:
        """What the progressive rows of the step just launched read, float [2, n] on the device: pages and
        weight, means over heads.
        """
        tables = self._tables_for(n)
        return torch.stack((tables.used[:, :n].float().mean((0, 2)), tables.weight[:, :n].mean((0, 2))))

    def _fits_graph(self, n: int) -> bool:
        return self._captured is not None and n <= self._captured.size

    def _tables_for(self, n: int) -> StepTables:
        if self._captured is not None and n <= self._captured.size:
            return self._captured
        if self._eager is None or self._eager.size < n:
            larger = StepTables(max(n, 8), self._shape, self._device, self._pattern)
            if self._eager is not None:
                larger.adopt(self._eager)
            if self._step is not None and self._tables is not None:  # a batch padded beyond its requests
                larger.set_rows(self._step.rows, tuple(range(len(self._step.rows))))
                larger.set_active(self._step.active)
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
        self._captured = StepTables(max_bs, self._shape, self._device, self._pattern)

    def get_cuda_graph_seq_len_fill_value(self) -> Any:
        return self.wrapped.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        self.wrapped.on_after_cuda_graph_warmup()

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
        return self.wrapped.init_forward_metadata_for_breakable_cuda_graph_capture(forward_batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped.prepare_forward_metadata_for_breakable_cuda_graph_replay(*args, **kwargs)

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return bool(self.wrapped.draft_extend_metadata_captured_in_graph())

    def support_triton(self) -> bool:
        return bool(self.wrapped.support_triton())

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        return self.wrapped.get_indexer_metadata(layer_id, forward_batch)

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
        if (
            self._quantized and not save_kv_cache
        ):  # a model with a fused KV write; it shows at its first step, the engine's own warm-up
            raise NotImplementedError(
                f"layer {layer.layer_id} writes its KV by itself, past a pool of few bits: serve this model with kv_bits=16"
            )
        if self._is_wrapped(decode):
            if self._prefixes is not None and not decode:
                self._pool.prepare(layer.layer_id, self._prefixes)
            out: torch.Tensor = self.wrapped.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return out
        return self._sparse(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.wrapped.forward_extend(*args, **kwargs)
        return out

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.wrapped.forward_decode(*args, **kwargs)
        return out

    # the step itself

    def _before_forward(self, forward_batch: Any) -> None:
        """Outside of any graph, on the forward's stream: the scheduler may write to the request table while a
        graph runs.
        """
        if not forward_batch.forward_mode.is_decode():
            return
        n = forward_batch.batch_size
        rows, lens, lens_cpu = (
            forward_batch.req_pool_indices[:n],
            forward_batch.seq_lens[:n],
            forward_batch.seq_lens_cpu,
        )
        self.statistics.before_decode(rows, lens, lens_cpu)
        if not self._is_wrapped(decode=True):
            self._tables = self._tables_for(n)
            self._tables.set_lengths(
                self._table, rows, lens, None if lens_cpu is None else int(lens_cpu[:n].max())
            )

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
        """q [batch, heads * head_dim]; k, v [batch, kv_heads, head_dim] of the newest tokens. Runs inside the
        graph where there is one.
        """
        tables = self._tables
        if (
            tables is None or kwargs
        ):  # what a model passes beside q, k and v shows at its first step, which is the engine's own warm-up
            raise NotImplementedError(
                f"layer {layer.layer_id} attends with {', '.join(sorted(kwargs)) or 'no tables'}, and sparse decoding knows plain "
                "attention only: serve this model with sparse_attention=off"
            )
        n, number, pool = q.shape[0], layer.layer_id, self._pool
        q = q.reshape(n, layer.tp_q_head_num, layer.qk_head_dim)
        keys: KV
        values: KV
        if self._quantized:
            pool.store(number, forward_batch.out_cache_loc, k, v)
            keys, values = pool.quantized(number)
        else:
            if save_kv_cache and k is not None:
                pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
            keys, values = pool.get_key_buffer(number), pool.get_value_buffer(number)
        stats, pages, lens, page = self.statistics.tables, tables.pages[:n], tables.lens[:n], self._page
        chosen = PageSelection(tables.index[number, :n], tables.counts[number, :n])
        if self.variant in (Variant.SELECTED, Variant.PROGRESSIVE):
            page_select(
                q,
                pages,
                lens,
                block_size=page,
                k_min=stats.k_min[number],
                k_max=stats.k_max[number],
                per_block=stats.per_page,
                budget_tokens=self._shape.capacity * page,
                budgets=tables.budgets[:n],
                active=tables.active[:n],
                into=chosen,
            )
        elif self.variant is Variant.REFRESHED:
            tables.queries[number, :n].copy_(q)
        out = sparse_decode(
            q,
            keys,
            values,
            pages,
            lens,
            page_size=page,
            index=chosen.blocks,
            counts=chosen.counts,
            kinds=tables.kinds[number, :n],
            sink_tokens=self.config.sink_tokens,
            local_tokens=self.config.local_tokens,
            scale=layer.scaling,
        )
        if self.variant is Variant.PROGRESSIVE:
            self._progressive(tables, q, keys, values, number, layer.scaling, out)
        elif self.variant is Variant.REFRESHED and number == self._shape.layers - 1:
            self._refresh(tables, n)
        return out.view(n, -1)

    def _refresh(self, tables: StepTables, n: int) -> None:
        """Choose the pages of the steps that follow, in all layers, by the queries of this one."""
        stats, page, shape = self.statistics.tables, self._page, self._shape
        at_once = max(1, _SCORE_BYTES // (4 * n * shape.kv_heads * shape.pages))
        for first in range(0, shape.layers, at_once):
            some = slice(first, first + at_once)
            page_select(
                tables.queries[some, :n],
                tables.pages[:n],
                tables.lens[:n],
                block_size=page,
                k_min=stats.k_min[some],
                k_max=stats.k_max[some],
                per_block=stats.per_page,
                budget_tokens=shape.capacity * page,
                budgets=tables.budgets[:n],
                active=tables.active[:n],
                into=PageSelection(tables.index[some, :n], tables.counts[some, :n]),
            )

    def _progressive(
        self,
        tables: StepTables,
        q: torch.Tensor,
        keys: KV,
        values: KV,
        number: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Add the progressive heads to ``out``, where they are zero: their rows have no chosen pages."""
        n, stats, page = q.shape[0], self.statistics.tables, self._page
        pages, lens = tables.pages[:n], tables.ranked_lens[:n]
        if self.config.ranking == "center":
            ranked = page_select(q, pages, lens, block_size=page, k_center=stats.k_center[number], rank=True)
        else:
            ranked = page_select(
                q,
                pages,
                lens,
                block_size=page,
                k_min=stats.k_min[number],
                k_max=stats.k_max[number],
                per_block=stats.per_page,
                rank=True,
            )
        counts = ranked.counts * tables.by_rank[number, :n]
        part = progressive_decode(
            q,
            keys,
            values,
            pages,
            lens,
            ranked.blocks,
            counts,
            page_size=page,
            threshold=tables.thresholds[:n],
            bound=self.config.bound,
            scale=scale,
        )
        tables.used[number, :n].copy_(part.blocks_used)
        tables.weight[number, :n].copy_(part.weight)
        out += part.out
