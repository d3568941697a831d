"""Filling a request's private slots with its documents' KV, moved to their places; then the recompute pass
over what a strategy chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_ext.context.buffers import upload
from sglang_ext.context.compose.fused_question import FusedQuestion
from sglang_ext.context.compose.gather import Filling, Gather
from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice, tokens_by_tier
from sglang_ext.context.recompute.graphs import capture_graphs
from sglang_ext.context.recompute.job import RecomputeJob
from sglang_ext.context.recompute.question_attention import QuestionRows, attention
from sglang_ext.context.recompute.recompute_pass import recompute, warm
from sglang_ext.context.rope import Rotation
from sglang_ext.context.scheduler.stage_timer import StageTimer


class Composer:
    """Works on the KV pool of one rank. Called on the stream of the forward pass; nothing here waits for the
    device.
    """

    def __init__(self, model_runner: Any, rotation: Rotation, tiers: Any, block: int) -> None:
        self._runner = model_runner
        self._device = torch.device(model_runner.device)
        self.gather = Gather(model_runner.token_to_kv_pool, rotation, tiers.pool, block)
        self.gather.warm()
        self.graphs = capture_graphs(model_runner)
        self.one_pass = FusedQuestion(model_runner, self.graphs)
        if self._device.type == "cuda":
            warm(model_runner)

    @property
    def recompute_graphs(self) -> int:
        """How many CUDA graphs of the recompute pass there are."""
        return 0 if self.graphs is None else len(self.graphs)

    def fill(
        self, contexts: Sequence[ComposedContext], rows: Sequence[torch.Tensor], *, whole: bool = False
    ) -> StageTimer:
        """Write the kept KV of each context into its slots, recompute, and note in the contexts what was done
        and when.

        ``rows``: int64, a context's S slots and behind them those that its question has by now. ``whole``:
        the contexts are all of the batch that is extended next, so the pass may compute their questions, too,
        and `one_pass` then has the forward's output."""
        slots = [row[: context.slots] for context, row in zip(contexts, rows, strict=True)]
        clock = StageTimer(self._device)
        self.gather([filling_of(context, target) for context, target in zip(contexts, slots, strict=True)])
        clock.mark("compose", self.gather.loading)
        self._ask(contexts, rows)
        clock.mark("ask")
        jobs = [self._job(context, target) for context, target in zip(contexts, slots, strict=True)]
        joined = (
            self.one_pass.joined(contexts, rows, jobs, loading=self.gather.loading is not None)
            if whole
            else None
        )
        hidden, by_graph = recompute(
            self._runner, joined or [job for job in jobs if job is not None], self.graphs
        )
        if joined and hidden is not None:
            self.one_pass.keep(hidden, contexts, joined)
        clock.mark("recompute")
        for context, job in zip(contexts, jobs, strict=True):
            context.filled = True
            context.recomputed = 0 if job is None else job.recomputed
            context.one_pass = joined is not None
            context.by_graph = by_graph and (job is not None or context.one_pass)
            context.by_tier = tokens_by_tier(context)
            context.clock = clock
        return clock

    def _ask(self, contexts: Sequence[ComposedContext], rows: Sequence[torch.Tensor]) -> None:
        """For rules that choose by what the question attends to: one pass of all questions over their
        composed contexts.
        """
        asking = [
            (context, row)
            for context, row in zip(contexts, rows, strict=True)
            if context.selection.needs_question_attention
        ]
        if not asking:
            return
        found = attention(
            self._runner, [self._question(context, row) for context, row in asking], self.graphs
        )
        for (context, _), looked_at in zip(asking, found, strict=True):
            chosen = context.draft.recomputed(context.selection.kept, context.in_order, looked_at)
            context.decided = replace(context.selection, recomputed=chosen, needs_question_attention=False)

    def _question(self, context: ComposedContext, row: torch.Tensor) -> QuestionRows:
        start = context.plan.question_start
        ids = upload(context.question, self._device)
        kept = upload(context.selection.kept.numpy(), self._device)
        own = row[context.slots : context.slots + len(ids)]
        placed = own if len(own) == len(ids) else None
        return QuestionRows(
            ids, start, context.question_at, context.plan.spans[0].end, kept, row[: context.slots], placed
        )

    def _job(self, context: ComposedContext, target: torch.Tensor) -> RecomputeJob | None:
        selection = context.selection
        choosing = selection.deviation_share is not None
        positions = (selection.kept.unique() if choosing else selection.recomputed).numpy()
        if not len(positions):
            return None
        job = RecomputeJob.plan(
            np.frombuffer(context.ids, dtype=np.int64)[positions],
            positions,
            selection.kept.numpy(),
            target,
            first_document=context.plan.spans[0].end,
            deviation_share=selection.deviation_share,
            fuse=selection.fuse,
        )
        if selection.compact:
            job.positions = upload(np.searchsorted(selection.kept.numpy(), positions), self._device)
        return job if job.recomputed or not choosing else None


def filling_of(context: ComposedContext, slots: torch.Tensor) -> Filling:
    """What is needed of the context now, into ``slots``."""
    starts = np.array([span.start for span in context.plan.spans], dtype=np.int64)
    return Filling(
        kept=context.needed.numpy(),
        slots=slots,
        starts=starts,
        shifts=starts if context.draft.rotate else np.zeros_like(starts),
        sources=[
            source.slots if isinstance(source, DocumentOnDevice) else source.pages
            for source in context.sources
        ],
        closed=context.decided is not None and context.decided.compact,
    )
