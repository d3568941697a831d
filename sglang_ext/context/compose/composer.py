"""Fills a request's private slots with its documents' KV, moved to their positions, and recomputes what its
strategy chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.context.compose.fused_question import FusedQuestion
from sglang_ext.context.compose.gather import Filling, Gather
from sglang_ext.context.compose.host_fill import gather_to_host
from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice, FillOutcome, tokens_by_tier
from sglang_ext.context.compose.stage_timer import StageTimer
from sglang_ext.context.recompute.anchor_attention import anchor_attention
from sglang_ext.context.recompute.graphs import capture_graphs
from sglang_ext.context.recompute.job import RecomputeJob
from sglang_ext.context.recompute.question_attention import QuestionRows, attention, warm_questions
from sglang_ext.context.recompute.recompute_pass import recompute, warm
from sglang_ext.context.selection.anchors import anchors_of
from sglang_ext.context.selection.recompute_rules import Kept
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.stages import stages
from sglang_ext.tensors.buffers import upload
from sglang_ext.tensors.rope import Rotation

if TYPE_CHECKING:
    from sglang_ext.documents.tier_store import TierStore


class Composer:
    """Works on the KV pool of one rank, on the stream of the forward pass. Only rules that use the question's
    attention wait for the device.
    """

    def __init__(
        self, model_runner: Any, rotation: Rotation, tiers: TierStore, ranks: Ranks | None = None
    ) -> None:
        """Compiles kernels and captures graphs. ``ranks``: those that vote, if there are several."""
        self._runner = model_runner
        self._device = torch.device(model_runner.device)
        self._ranks = ranks or Ranks()
        self.gather = Gather(model_runner.token_to_kv_pool, rotation, tiers.pages)
        self.gather.warm()
        self.graphs = capture_graphs(model_runner, self._ranks)
        self.fused_question = FusedQuestion(model_runner, self.graphs)
        if self._device.type == "cuda":
            warm(model_runner)
            warm_questions(model_runner)

    def fill(
        self, contexts: Sequence[ComposedContext], rows: Sequence[torch.Tensor], *, whole: bool = False
    ) -> StageTimer:
        """Write the kept KV of each context into its slots, recompute, and record in the contexts what was
        done.

        Args:
            rows: int64, a context's S slots and behind them those that its question has by now.
            whole: the contexts are the whole batch that is extended next. Then the pass may compute their
                questions, too, and `fused_question` has the forward pass's output.
        """
        timer = StageTimer(self._device)
        self._gather_everywhere(contexts, rows)
        timer.mark("compose", self.gather.loading)
        with stages.together():
            earlier = [self._earlier(c, row[: c.slots]) for c, row in zip(contexts, rows, strict=True)]
            self._run_apart(contexts, rows, earlier)
            stages.reach("question")
            self._choose_by_attention(contexts, rows, earlier)
            timer.mark("ask")
            jobs = [
                self._job(c, row[: c.slots], before)
                for c, row, before in zip(contexts, rows, earlier, strict=True)
            ]
            stages.reach("recompute")
            loading = self.gather.loading is not None
            passed = self.fused_question.run(contexts, rows, jobs, loading=loading) if whole else None
            fused = passed is not None
            if passed is None:
                passed = recompute(self._runner, [job for job in jobs if job is not None], self.graphs)
        timer.mark("recompute")
        for context, job in zip(contexts, jobs, strict=True):
            outcome = FillOutcome(
                timer=timer,
                by_tier=tokens_by_tier(context),
                recomputed=0 if job is None else job.recomputed,
                by_graph=passed.by_graph and (job is not None or fused),
                fused=fused,
            )
            context.fill(outcome)
        return timer

    def _gather_everywhere(self, contexts: Sequence[ComposedContext], rows: Sequence[torch.Tensor]) -> None:
        """Launch the gather, and raise unless every rank could: the passes behind it have collectives, in
        which the others would wait for one that has failed.
        """
        error: Exception | None = None
        try:
            stages.reach("gather")
            fillings = [filling_of(c, row[: c.slots]) for c, row in zip(contexts, rows, strict=True)]
            pairs = list(zip(contexts, fillings, strict=True))
            for context, filling in pairs:
                if context.place.on_host is not None:
                    gather_to_host(self.gather, self._runner.token_to_kv_pool, filling, context.place.on_host)
            turns = [turns_of(c, row) for c, row in zip(contexts, rows, strict=True) if c.located.turns]
            own = (filling for context, filling in pairs if context.place.on_host is None)
            if into_slots := [*turns, *own]:
                self.gather(into_slots)
        except Exception as raised:  # noqa: BLE001 - raised again below
            error = raised
        if not self._ranks.all_agree(error is None):
            raise error or RuntimeError(stages.ELSEWHERE)

    def _earlier(self, context: ComposedContext, target: torch.Tensor) -> RecomputeJob | None:
        """The tokens of a session's earlier turns that its key lacks, as rows; None if it has them all.

        They end with the answer's last token, which no pass has read yet, and the template's text behind it.
        """
        positions = context.earlier
        if not len(positions):
            return None
        return RecomputeJob.plan(
            np.frombuffer(context.ids, dtype=np.int64)[positions],
            positions,
            context.selection.kept.numpy(),
            target,
            first_document=context.new_start,
        )

    def _run_apart(
        self,
        contexts: Sequence[ComposedContext],
        rows: Sequence[torch.Tensor],
        earlier: list[RecomputeJob | None],
    ) -> None:
        """Run those ``earlier`` rows that cannot ride with a later pass, and take them off the list."""
        apart: list[RecomputeJob] = []
        for number, (context, row, job) in enumerate(zip(contexts, rows, earlier, strict=True)):
            selection = context.selection
            cut = selection.needs_question_attention and (
                not _is_whole(context, row) or context.partial.rule.reads_anchors
            )
            if job is not None and (cut or selection.fuse or selection.deviation_share is not None):
                apart.append(job)
                earlier[number] = None
        if apart:
            recompute(self._runner, apart, self.graphs)

    def _choose_by_attention(
        self,
        contexts: Sequence[ComposedContext],
        rows: Sequence[torch.Tensor],
        earlier: list[RecomputeJob | None],
    ) -> None:
        """Settle rules that choose by what the question attends to, in one pass of all such questions over
        their composed contexts. ``earlier`` rows ride along and are taken off the list.
        """
        pending = [
            (number, context)
            for number, context in enumerate(contexts)
            if context.selection.needs_question_attention
        ]
        if not pending:
            return
        questions = [self._question(context, rows[number], earlier[number]) for number, context in pending]
        weights = self._attention([context for _, context in pending], questions)
        own = [
            context.partial.recomputed(context.selection.kept, context.in_order, seen)
            for (_, context), seen in zip(pending, weights, strict=True)
        ]
        # analyses may differ between ranks, as in the selection stage
        agreed = self._ranks.first_each(own, lambda positions: positions.numpy().tobytes())
        for (number, context), chosen in zip(pending, agreed, strict=True):
            earlier[number] = None
            context.settle(replace(context.selection, recomputed=chosen, needs_question_attention=False))

    def _attention(
        self, contexts: Sequence[ComposedContext], questions: Sequence[QuestionRows]
    ) -> list[torch.Tensor]:
        """What each question attends to, as its rule measures it."""
        whole = [n for n, context in enumerate(contexts) if not context.partial.rule.reads_anchors]
        found: dict[int, torch.Tensor] = {}
        if whole:
            wanted = [questions[n] for n in whole]
            found |= zip(whole, attention(self._runner, wanted, self.graphs), strict=True)
        few = [n for n in range(len(contexts)) if n not in found]
        if few:
            found |= zip(
                few,
                anchor_attention(
                    self._runner,
                    [questions[n] for n in few],
                    [self._anchors(contexts[n], questions[n].slots) for n in few],
                    contexts[few[0]].critical_layers,
                ),
                strict=True,
            )
        return [found[n] for n in range(len(contexts))]

    def _anchors(self, context: ComposedContext, slots: torch.Tensor) -> list[torch.Tensor]:
        """The slots of the context's anchors in each layer."""
        kept = Kept(context.plan, context.selection.kept, context.in_order)
        places = anchors_of(kept, self._runner.token_to_kv_pool.layer_num)
        return [slots[upload(place.numpy(), self._device)] for place in places]

    def _question(
        self, context: ComposedContext, row: torch.Tensor, earlier: RecomputeJob | None
    ) -> QuestionRows:
        slots, own = row[: context.slots], row[context.slots : context.slots + context.question_tokens]
        return QuestionRows(
            ids=context.question,
            start=context.plan.question_start,
            at=context.question_at,
            first=context.plan.spans[0].end,
            kept=context.selection.kept.numpy(),
            slots=slots,
            job=context.question_job(slots, own).behind(earlier) if _is_whole(context, row) else None,
        )

    def _job(
        self, context: ComposedContext, target: torch.Tensor, earlier: RecomputeJob | None
    ) -> RecomputeJob | None:
        """The context's part of the recompute pass, behind its ``earlier`` rows; None if nothing is
        recomputed."""
        selection = context.selection
        kept = selection.kept.numpy()
        choosing = selection.deviation_share is not None
        positions = np.unique(kept) if choosing else selection.recomputed.numpy()
        positions = positions[positions >= context.new_start]
        if not len(positions):
            return earlier
        job = RecomputeJob.plan(
            np.frombuffer(context.ids, dtype=np.int64)[positions],
            positions,
            kept,
            target,
            first_document=context.plan.spans[0].end,
            deviation_share=selection.deviation_share,
            fuse=selection.fuse,
        )
        if selection.compact:
            job.positions = upload(np.searchsorted(kept, positions), self._device)
        return job.behind(earlier) if job.recomputed or not choosing else None


def _is_whole(context: ComposedContext, row: torch.Tensor) -> bool:
    """True if the question has all its slots by now."""
    return len(row) >= context.slots + context.question_tokens


def turns_of(context: ComposedContext, slots: torch.Tensor) -> Filling:
    """The part of a `Gather` call that brings a session's turns from the host, as they are."""
    starts = np.array([turn.start - context.located.held for turn in context.located.turns], dtype=np.int64)
    return Filling(
        kept=np.arange(context.there - context.located.held, dtype=np.int64),
        slots=slots[context.located.held : context.there],
        starts=starts,
        shifts=np.zeros_like(starts),
        sources=[turn.pages for turn in context.located.turns],
    )


def filling_of(context: ComposedContext, slots: torch.Tensor) -> Filling:
    """The part of a `Gather` call that brings what the context needs now into ``slots``. A session's earlier
    turns are there already, or rows of a pass.
    """
    starts = np.array([span.start for span in context.plan.spans], dtype=np.int64)
    return Filling(
        kept=context.needed.numpy()[..., context.new_start :],
        slots=slots[context.new_start :],
        starts=starts,
        shifts=starts if context.partial.rotate else np.zeros_like(starts),
        sources=[
            source.slots if isinstance(source, DocumentOnDevice) else source.pages
            for source in context.located.sources
        ],
        closed=context.decided is not None and context.decided.compact,
    )
