"""The recompute pass through the model's layers: chosen tokens of composed contexts run again and their KV is
replaced.

A recomputed token at position p attends, in every layer, to the composed slots with positions up to p
(docs/methods.md, section 1). Slots are sorted by position, so that is a prefix length per row and layer. A
row needs nothing of rows behind it: rows that run in slices, in order, get what they get in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sglang_ext.context.recompute.job import QueryObserver, RecomputeJob, slices
from sglang_ext.context.recompute.row_attention import Rows
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals.model import forward_batch
from sglang_ext.stages import cancelled_pass
from sglang_ext.tensors.buffers import Buffers, Ints, upload
from sglang_ext.versions import tp_group

_CHOOSING_LAYER = 1


class _Pass:
    """Attention of a pass, as `RadixAttention` finds it in the forward context. Writes new K and V into the
    composed slots itself.
    """

    def __init__(
        self, model_runner: Any, rows: Rows, watch: QueryObserver | None = None, beside: Buffers | None = None
    ) -> None:
        self._watch = watch
        self.token_to_kv_pool = beside or model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._rows = rows

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        """q [rows, heads * head_dim], k and v [rows, kv_heads, head_dim] of all jobs, one after the other."""
        cancelled_pass.look(q.device)
        number = layer.layer_id
        keys, values = (
            self.token_to_kv_pool.get_key_buffer(number),
            self.token_to_kv_pool.get_value_buffer(number),
        )
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self._watch is not None:
            self._watch(number, q, layer.scaling)
        return self._rows.step(number, q, k, v, keys, values, layer.scaling).flatten(1)


class _DeviationFound(Exception):
    """Ends a pass at the layer that it was run for. ``deviation`` f32 [rows]."""

    def __init__(self, deviation: torch.Tensor) -> None:
        super().__init__("the deviation of all rows is known")
        self.deviation = deviation


class _DeviationPass(_Pass):
    """Runs up to the values of layer 1, which stay as they are in the pool."""

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        if layer.layer_id != _CHOOSING_LAYER:
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache)
        targets = self._rows.targets[min(_CHOOSING_LAYER, len(self._rows.targets) - 1)]
        cached = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[targets]
        new = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        raise _DeviationFound((new.float() - cached.float()).square().sum((1, 2)))


def run_layers(
    model_runner: Any,
    rows: Rows,
    ids: torch.Tensor,
    positions: torch.Tensor,
    watch: QueryObserver | None = None,
    beside: Buffers | None = None,
) -> torch.Tensor:
    """Run tokens ``ids`` at ``positions``, int64 [rows] each, through the model as SGLang does, with what it
    does around its layers. Returns hidden states after its last norm, [rows, hidden size].
    """
    return _run(model_runner, _Pass(model_runner, rows, watch, beside), ids, positions)


def run_slices(
    model_runner: Any,
    jobs: Sequence[RecomputeJob],
    most: int,
    keep: Ints,
    watch: QueryObserver | None = None,
    beside: Buffers | None = None,
) -> torch.Tensor:
    """Run the jobs' rows, at most ``most`` in one call of the model. Returns hidden states as `run_layers`,
    of the rows ``keep``, ascending.
    """
    found, first = [], 0
    for part in slices(jobs, most):
        ids, positions = torch.cat([job.ids for job in part]), torch.cat([job.positions for job in part])
        seen = None if watch is None else partial(watch, first=first)
        hidden = run_layers(model_runner, Rows.of(part), ids, positions, seen, beside)
        own = keep[(keep >= first) & (keep < first + len(ids))] - first
        found.append(hidden.index_select(0, upload(own, hidden.device)))
        first += len(ids)
    return torch.cat(found)


def choose_rows(model_runner: Any, jobs: Sequence[RecomputeJob], most: int) -> None:
    """Narrow the jobs that choose rows to those whose values in layer 1 differ most from the cached ones, as
    CacheBlend does. All of their rows replace their KV in layer 0.

    Differences are squared and summed over the heads of all ranks.
    """
    choosing = [job for job in jobs if job.choose is not None]
    layers = model_runner.token_to_kv_pool.layer_num
    if not choosing or layers <= _CHOOSING_LAYER:
        return
    found = []
    for part in slices(choosing, most):
        ids, positions = torch.cat([job.ids for job in part]), torch.cat([job.positions for job in part])
        try:
            _run(model_runner, _DeviationPass(model_runner, Rows.of(part)), ids, positions)
        except _DeviationFound as end:
            found.append(end.deviation)
    deviation = Ranks(tp_group(model_runner)).sum(torch.cat(found))  # every rank must choose the same rows
    for job, own in zip(choosing, deviation.split([len(job.ids) for job in choosing]), strict=True):
        if job.choose is not None and job.candidates is not None:
            best = own[job.candidates].topk(job.choose).indices
            job.narrow(job.candidates[best].sort().values, layers)


def _run(model_runner: Any, backend: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=backend)):
        hidden = model_runner.model.model(
            input_ids=ids, positions=positions, forward_batch=forward_batch(ids, positions)
        )
    # some models return the states of inner layers as well
    states: torch.Tensor = hidden[0] if isinstance(hidden, tuple) else hidden
    return states
