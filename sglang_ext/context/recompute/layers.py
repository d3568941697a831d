"""The recompute pass through the model's layers: chosen tokens of composed contexts run again and their KV is
replaced.

A recomputed token at position p attends, in every layer, to the composed slots with positions up to p
(docs/methods.md, section 1). Slots are sorted by position, so that is a prefix length per row and layer. All
requests of a scheduler step run in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_ext.context.buffers import Buffers
from sglang_ext.context.recompute.job import RecomputeJob, Watch
from sglang_ext.context.recompute.row_attention import Rows
from sglang_ext.model import decoder_layers, forward_batch
from sglang_ext.ranks import Ranks


class _Pass:
    """Attention of a pass, as `RadixAttention` finds it in the forward context. Writes new K and V into the
    composed slots itself.
    """

    def __init__(
        self,
        model_runner: Any,
        rows: Rows,
        jobs: Sequence[RecomputeJob] = (),
        watch: Watch | None = None,
        beside: Buffers | None = None,
    ) -> None:
        """``jobs``: those of ``rows``, if some have rows to choose."""
        self._watch = watch
        self.token_to_kv_pool = beside or model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._ranks = Ranks(model_runner.tp_group)
        self._jobs = jobs
        self._rows = rows
        self._chooses = any(job.choose is not None for job in jobs)
        self.chosen: torch.Tensor | None = None  # rows that continue after layer 1, if not all do

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        """q [rows, heads * head_dim], k and v [rows, kv_heads, head_dim] of all jobs, one after the other."""
        number = layer.layer_id
        keys, values = (
            self.token_to_kv_pool.get_key_buffer(number),
            self.token_to_kv_pool.get_value_buffer(number),
        )
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self._watch is not None:
            self._watch(number, q, layer.scaling)
        if number != 1 or not self._chooses:
            return self._rows.step(number, q, k, v, keys, values, layer.scaling).flatten(1)
        self.chosen = rows = self._choose(v, values)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        out[rows] = self._rows.step(number, q[rows], k[rows], v[rows], keys, values, layer.scaling)
        return out.flatten(1)

    def _choose(self, v: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Narrow the jobs to the rows whose values, v [rows, kv_heads, head_dim], differ most from the cached
        ones, as CacheBlend does.

        Differences are squared and summed over the heads of all ranks. Returns the remaining rows of the
        pass, int64 ascending.
        """
        left, start = [], 0
        for job in self._jobs:
            count = len(job.positions)
            rows = torch.arange(count, device=v.device)
            if job.choose is not None and job.candidates is not None:
                cached = values[job.targets[min(1, len(job.targets) - 1), job.candidates]]
                deviation = (v[start + job.candidates].float() - cached.float()).square().sum((1, 2))
                deviation = self._ranks.sum(deviation)  # every rank must choose the same rows
                rows = job.candidates[deviation.topk(job.choose).indices].sort().values
                job.narrow(rows)
            left.append(rows + start)
            start += count
        self._rows = Rows.of(self._jobs)
        return torch.cat(left)


def run_layers(
    model_runner: Any,
    rows: Rows,
    ids: torch.Tensor,
    positions: torch.Tensor,
    watch: Watch | None = None,
    beside: Buffers | None = None,
) -> torch.Tensor:
    """Run tokens ``ids`` at ``positions``, int64 [rows] each, through the model as SGLang does, with what it
    does around its layers. Returns hidden states after its last norm, [rows, hidden size].
    """
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    backend: Any = _Pass(model_runner, rows, (), watch, beside)
    with forward_context(ForwardContext(attn_backend=backend)):
        hidden = model_runner.model.model(
            input_ids=ids, positions=positions, forward_batch=forward_batch(ids, positions)
        )
    # some models return the states of inner layers as well
    states: torch.Tensor = hidden[0] if isinstance(hidden, tuple) else hidden
    return states


def run_choosing(
    model_runner: Any,
    jobs: Sequence[RecomputeJob],
    ids: torch.Tensor,
    positions: torch.Tensor,
    watch: Watch | None = None,
    beside: Buffers | None = None,
) -> None:
    """Run as `run_layers` does, for jobs of which some choose rows: layer by layer, because fewer rows
    continue after layer 1."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    model = model_runner.model
    backend: Any = _Pass(model_runner, Rows.of(jobs), jobs, watch, beside)
    batch = forward_batch(ids, positions)
    hidden, residual = model.model.embed_tokens(ids), None
    with forward_context(ForwardContext(attn_backend=backend)):
        for number, layer in enumerate(decoder_layers(model)):
            hidden, residual = layer(positions, hidden, batch, residual)
            if number == 1 and backend.chosen is not None:
                left = backend.chosen
                ids, positions, hidden = ids[left], positions[left], hidden[left]
                residual = residual[left] if residual is not None else None
                batch = forward_batch(ids, positions)
