"""Filling a request's private slots with its documents' KV, moved to their places; then the recompute pass over what a strategy chose."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_ext.context.clock import StageClock
from sglang_ext.context.gather import Filling, Gather, Ints, needed_blocks
from sglang_ext.context.recompute import RecomputeJob, recompute
from sglang_ext.context.rope import Rotation
from sglang_ext.context.strategies import Selection
from sglang_ext.protocol import ContextPlan, ContextReport


@dataclass(slots=True)
class DeviceSource:
    """A document in SGLang's pool: slot numbers int64 [tokens on the device], and the tree node that is locked meanwhile."""

    slots: torch.Tensor
    node: Any


@dataclass(slots=True)
class HostSource:
    """A document in host pages, pinned meanwhile: page numbers int64 [blocks], -1 where none is needed; whether they came from disk."""

    key: str
    pages: Ints
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
    reloads: int = 0  # how often loaded blocks were evicted again before the request came to them
    _blocks: list[Ints] | None = None
    filled: bool = False
    clock: StageClock | None = None  # of the batch that filled it, until its report is written
    by_tier: dict[str, int] = field(default_factory=dict)  # kept document tokens by the tier that they came from
    recomputed: int = 0
    waiting_since: float | None = None
    below_device: bool = False  # take documents from host or disk even where the device has them
    load_ms: float = 0.0

    @property
    def slots(self) -> int:
        return self.selection.slots

    def blocks(self, number: int, block: int) -> Ints:
        """Blocks of ``block`` tokens of document ``number`` that any layer keeps a token of, ascending."""
        if self._blocks is None:
            starts, ends = (np.array(values, dtype=np.int64) for values in zip(*((s.start, s.end) for s in self.plan.spans), strict=True))
            self._blocks = needed_blocks(self.selection.kept.numpy(), starts, ends, block)
        return self._blocks[number]

    @property
    def delta(self) -> int:
        """What positions after the context are ahead of their slots: the question follows the full length, not the kept one."""
        return self.plan.question_start - self.slots


class Composer:
    """Works on the KV pool of one rank. Called on the stream of the forward pass; nothing here waits for the device."""

    def __init__(self, model_runner: Any, rotation: Rotation, tiers: Any, block: int) -> None:
        self._runner = model_runner
        self._device = torch.device(model_runner.device)
        self._gather = Gather(model_runner.token_to_kv_pool, rotation, tiers.pool, block)
        self._gather.warm()

    def fill(self, contexts: Sequence[ComposedContext], slots: Sequence[torch.Tensor]) -> StageClock:
        """Write the kept KV of each context into its slots int64 [S], recompute, and note in the contexts what was done and when."""
        clock = StageClock(self._device)
        self._gather([_filling(context, target) for context, target in zip(contexts, slots, strict=True)])
        clock.mark("compose")
        jobs = [self._job(context, target) for context, target in zip(contexts, slots, strict=True)]
        recompute(self._runner, [job for job in jobs if job is not None])
        clock.mark("recompute")
        for context, job in zip(contexts, jobs, strict=True):
            context.filled = True
            context.recomputed = 0 if job is None else job.recomputed
            context.by_tier = tokens_by_tier(context)
            context.clock = clock
        return clock

    def _job(self, context: ComposedContext, target: torch.Tensor) -> RecomputeJob | None:
        selection = context.selection
        choosing = selection.deviation_share is not None
        positions = (selection.kept if choosing else selection.recomputed).numpy()
        if not len(positions):
            return None
        job = RecomputeJob.plan(
            np.frombuffer(context.ids, dtype=np.int64)[positions],
            positions,
            selection.kept.numpy(),
            target,
            first_document=context.plan.spans[0].end,
            deviation_share=selection.deviation_share,
        )
        return job if job.recomputed or not choosing else None


def _filling(context: ComposedContext, slots: torch.Tensor) -> Filling:
    starts = np.array([span.start for span in context.plan.spans], dtype=np.int64)
    return Filling(
        kept=context.selection.kept.numpy(),
        slots=slots,
        starts=starts,
        shifts=starts if context.selection.rotate else np.zeros_like(starts),
        sources=[source.slots if isinstance(source, DeviceSource) else source.pages for source in context.sources],
    )


def report_of(context: ComposedContext) -> ContextReport:
    """What was done for a request whose first forward pass has run."""
    stages = context.clock.stages() if context.clock is not None else {}
    return ContextReport(
        strategy=context.plan.strategy,
        document_tokens=context.plan.question_start - context.plan.spans[0].end,
        kept=sum(context.by_tier.values()),
        recomputed=context.recomputed,
        by_tier=context.by_tier,
        compose_ms=stages.get("compose", 0.0),
        load_ms=context.load_ms,
        recompute_ms=stages.get("recompute", 0.0),
        extend_ms=stages.get("extend", 0.0),
    )


def tokens_by_tier(context: ComposedContext) -> dict[str, int]:
    """Kept document tokens by the tier that their document came from (in the first layer, where layers keep different ones)."""
    kept = context.selection.kept if context.selection.kept.dim() == 1 else context.selection.kept[0]
    spans = context.plan.spans
    counts = np.diff(np.searchsorted(kept.numpy(), [*(span.start for span in spans), spans[-1].end]))
    tiers: dict[str, int] = {}
    for tokens, source in zip(counts[1:].tolist(), context.sources[1:], strict=True):
        tier = tier_of(source)
        tiers[tier] = tiers.get(tier, 0) + tokens
    return tiers


def tier_of(source: DeviceSource | HostSource) -> str:
    """device, host or disk."""
    return "device" if isinstance(source, DeviceSource) else "disk" if source.from_disk else "host"
