"""Selects the kept document tokens from a partial selection, the analyses and the question's query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial as later

import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection import samkv
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.choose_sentences import begin_sentences
from sglang_ext.context.selection.sentences import Sentences
from sglang_ext.context.selection.signals import Evidence
from sglang_ext.context.selection.signals.attention import Attention
from sglang_ext.context.selection.signals.document import document_prior
from sglang_ext.context.selection.strategies import PartialSelection
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan
from sglang_ext.wire.request_options import SamKvOptions


class Selector:
    """Runs the selectors of `samkv`. All ranks take part in every call and choose the same tokens."""

    def __init__(self, rotation: Rotation, analyser: Analyser, ranks: Ranks) -> None:
        self._rotation = rotation
        self._analyser = analyser
        self._ranks = ranks

    def select(
        self,
        partial: PartialSelection,
        analyses: Sequence[Analysis],
        query: torch.Tensor | None,
        ids: torch.Tensor,
        stable: Sequence[int],
    ) -> samkv.Chosen | None:
        """Choose the kept document tokens; None if there is nothing to select.

        Args:
            analyses: one a document, in the order of the prompt.
            query: f32 [layers, heads, head_dim], the question's; None if the selector does not use it.
            ids: int64, the whole prompt.
            stable: layers over which P is averaged; empty for the built-in ones.
        """
        return self.begin(partial, analyses, query, self.read(partial, analyses, query, ids), None, stable)()

    def read(
        self,
        partial: PartialSelection,
        analyses: Sequence[Analysis],
        query: torch.Tensor | None,
        ids: torch.Tensor,
    ) -> Evidence | None:
        """What the signals read where sentences are chosen, else None."""
        if not partial.selects or partial.samkv is None or partial.blocks is None:
            return None
        options = partial.samkv
        if not options.by_sentence:
            return None
        return self.evidence(options, partial.blocks, partial.plan, analyses, query, ids)

    def begin(
        self,
        partial: PartialSelection,
        analyses: Sequence[Analysis],
        query: torch.Tensor | None,
        evidence: Evidence | None,
        attention: Attention | None,
        stable: Sequence[int],
    ) -> Callable[[], samkv.Chosen | None]:
        """Begin `select` as far as nothing waits for the device, and return what ends it: of several
        requests, all are begun before the first is ended. ``evidence`` as from `read`; ``attention``: what
        `begin_attention` has returned for it."""
        if not partial.selects or partial.samkv is None or partial.blocks is None:
            return _nothing
        if evidence is not None:
            return begin_sentences(evidence, attention)
        if query is None:
            return _nothing
        options, blocks, start = partial.samkv, partial.blocks, partial.plan.question_start
        return later(
            samkv.choose,
            options,
            blocks,
            analyses,
            query,
            start,
            self._rotation,
            reduce=self._ranks.sum,
            highest=self._ranks.max,
            stable=stable or None,
            prior=document_prior(partial.plan.scores, options.experimental.document_prior),
        )

    def evidence(
        self,
        options: SamKvOptions,
        blocks: Blocks,
        plan: ContextPlan,
        analyses: Sequence[Analysis],
        query: torch.Tensor | None,
        ids: torch.Tensor,
    ) -> Evidence:
        """What the signals read; arguments as in `select`."""
        start = plan.question_start
        return Evidence(
            options,
            blocks,
            analyses,
            Sentences.of(analyses),
            ids[blocks.first : start],
            ids[start:],
            self._analyser.texts,
            query,
            start,
            self._rotation,
            plan.scores,
            reduce=self._ranks.sum,
            highest=self._ranks.max,
        )


def _nothing() -> None:
    """The end of a selection that has nothing to select."""
