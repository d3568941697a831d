"""Filling a request's private slots with its documents' KV, moved to their places; then the recompute pass over what a strategy chose."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_ext.context.recompute import RecomputeJob, recompute
from sglang_ext.context.rope import Rotation
from sglang_ext.context.strategies import Selection
from sglang_ext.protocol import ContextPlan, ContextReport, Span


@dataclass(slots=True)
class DeviceSource:
    """A document in SGLang's pool: slot numbers int64 [tokens on the device], and the tree node that is locked meanwhile."""

    slots: torch.Tensor
    node: Any


@dataclass(slots=True)
class HostSource:
    """A document in host pages: page numbers int64 [blocks], pinned meanwhile; bytes that had to come from disk for it."""

    key: str
    pages: torch.Tensor
    from_disk: bool = False


@dataclass(slots=True)
class ComposedContext:
    """A composed request's state in the scheduler, from its arrival to its end."""

    plan: ContextPlan
    ids: array[int]  # of the whole prompt
    keys: tuple[str, ...]
    selection: Selection
    sources: list[DeviceSource | HostSource] = field(default_factory=list)
    tickets: dict[str, Any] = field(default_factory=dict)  # loads from disk under way, by key
    filled: bool = False
    report: ContextReport | None = None
    waiting_since: float | None = None
    load_ms: float = 0.0

    @property
    def slots(self) -> int:
        return self.selection.slots

    @property
    def delta(self) -> int:
        """What positions after the context are ahead of their slots: the question follows the full length, not the kept one."""
        return self.plan.question_start - self.slots


class Composer:
    """Works on the KV pool of one rank. Called on the stream of the forward pass."""

    def __init__(self, model_runner: Any, rotation: Rotation, tiers: Any, block: int) -> None:
        self._runner = model_runner
        self._rotation = rotation
        self._tiers = tiers
        self._block = block
        self._pool = model_runner.token_to_kv_pool
        self._layers = model_runner.token_to_kv_pool.layer_num
        self._device = torch.device(model_runner.device)

    def fill(self, contexts: Sequence[ComposedContext], slots: Sequence[torch.Tensor]) -> None:
        """Write the kept KV of each context into its slots int64 [S], recompute, and set the reports.

        The reports' stage times are those until the work is launched: on CUDA it runs behind them, on a CPU it has run.
        """
        started = time.perf_counter()
        for context, target in zip(contexts, slots, strict=True):
            self._gather(context, target)
        gathered = time.perf_counter()
        jobs = [self._job(context, target) for context, target in zip(contexts, slots, strict=True)]
        recompute(self._runner, [job for job in jobs if job is not None])
        ended = time.perf_counter()
        for context, job in zip(contexts, jobs, strict=True):
            context.filled = True
            by_tier = tokens_by_tier(context)
            context.report = ContextReport(
                strategy=context.plan.strategy,
                document_tokens=context.plan.question_start - context.plan.spans[0].end,
                kept=sum(by_tier.values()),
                recomputed=0 if job is None or job.done is None else int((job.done >= context.plan.spans[0].end).sum()),
                by_tier=by_tier,
                compose_ms=(gathered - started) * 1e3,
                load_ms=context.load_ms,
                recompute_ms=(ended - gathered) * 1e3,
            )

    def _gather(self, context: ComposedContext, target: torch.Tensor) -> None:
        kept = context.selection.kept
        per_layer = kept.dim() == 2
        for span, source in zip(context.plan.spans, context.sources, strict=True):
            shift = span.start if context.selection.rotate else 0
            for layers, positions in self._rows(kept, per_layer):
                here = (positions >= span.start) & (positions < span.end)
                destination, offsets = target[here.to(target.device)], positions[here] - span.start
                if len(offsets):
                    self._copy(source, layers, offsets, destination, shift)

    def _rows(self, kept: torch.Tensor, per_layer: bool) -> list[tuple[range, torch.Tensor]]:
        """(layers, positions) pairs that share positions."""
        if per_layer:
            return [(range(layer, layer + 1), kept[layer]) for layer in range(self._layers)]
        return [(range(self._layers), kept)]

    def _copy(self, source: DeviceSource | HostSource, layers: range, offsets: torch.Tensor, target: torch.Tensor, shift: int) -> None:
        """Tokens ``offsets`` [n] of one document into slots ``target`` [n], keys moved by ``shift`` positions."""
        shifts = torch.full((len(offsets),), shift, dtype=torch.int64, device=self._device)
        if isinstance(source, DeviceSource):
            taken = source.slots[offsets.to(source.slots.device)]
        else:
            blocks, place = torch.unique(offsets // self._block, return_inverse=True)
            pages, taken = source.pages[blocks], (place * self._block + offsets % self._block).to(self._device)
        for layer in layers:
            keys, values = self._pool.get_key_buffer(layer), self._pool.get_value_buffer(layer)
            if isinstance(source, DeviceSource):
                k, v = keys[taken], values[taken]
            else:
                whole = self._tiers.pool[:, layer].index_select(0, pages).to(self._device, non_blocking=True)
                whole = whole.permute(1, 0, 3, 2, 4).flatten(1, 2)  # [2, tokens of whole blocks, kv_heads, head_dim]
                k, v = whole[0, taken], whole[1, taken]
            keys[target] = self._rotation.rotate(k, shifts) if shift else k
            values[target] = v

    def _job(self, context: ComposedContext, target: torch.Tensor) -> RecomputeJob | None:
        selection = context.selection
        n = context.plan.question_start
        if selection.deviation_share is not None:
            positions = torch.arange(n)
        elif len(selection.recomputed):
            positions = selection.recomputed
        else:
            return None
        ids = torch.tensor(context.ids[:n], dtype=torch.int64)[positions]
        job = RecomputeJob(
            ids=ids.to(self._device),
            positions=positions.to(self._device),
            kept=selection.kept.to(self._device),
            slots=target,
        )
        if selection.deviation_share is not None:
            job.deviation_share = selection.deviation_share
            job.choosable = (positions >= context.plan.spans[0].end).to(self._device)
        return job


def tokens_by_tier(context: ComposedContext) -> dict[str, int]:
    """Kept document tokens by the tier that their document came from (in the first layer, where layers keep different ones)."""
    kept = context.selection.kept if context.selection.kept.dim() == 1 else context.selection.kept[0]
    tiers: dict[str, int] = {}
    for span, source in zip(context.plan.spans[1:], context.sources[1:], strict=True):
        tier = "device" if isinstance(source, DeviceSource) else "disk" if source.from_disk else "host"
        tiers[tier] = tiers.get(tier, 0) + count_within(kept, span)
    return tiers


def count_within(positions: torch.Tensor, span: Span) -> int:
    """How many of the ascending positions lie in the span."""
    bounds = torch.searchsorted(positions, torch.tensor([span.start, span.end]))
    return int(bounds[1] - bounds[0])
