"""Signals that score the sentences of a context, and their sum: docs/composed-contexts.md."""

from __future__ import annotations

from collections.abc import Collection

import torch

from sglang_ext.context.selection.signals.attention import attention
from sglang_ext.context.selection.signals.base import Evidence, Signal
from sglang_ext.context.selection.signals.document import document
from sglang_ext.context.selection.signals.feedback import feedback
from sglang_ext.context.selection.signals.sentence import sentence
from sglang_ext.context.selection.signals.words import words
from sglang_ext.wire.request_options import SamKvExperiment

__all__ = ["SIGNALS", "Evidence", "Scores", "contributions", "fused", "scored"]

SIGNALS: dict[str, Signal] = {
    "attention": attention,
    "document": document,
    "sentence": sentence,
    "words": words,
}
"""The signals of the first step, sorted by name. `feedback` follows what these find."""


def weights(tuned: SamKvExperiment, *, retrieved: bool) -> dict[str, float]:
    """The weight of each signal, 1 together. The retriever's have none unless a request is ``retrieved``,
    and so has its scores."""
    retriever = tuned.retrieval_weight if retrieved else 0.0
    own = 1 - retriever
    return {
        "attention": own * (1 - tuned.lexical_weight),
        "document": retriever * tuned.document_weight,
        "sentence": retriever * (1 - tuned.document_weight),
        "words": own * tuned.lexical_weight,
    }


Scores = dict[str, torch.Tensor | None]
"""Signals by name, as `Signal` returns them."""


def scored(evidence: Evidence, begun: Collection[str] = ()) -> Scores:
    """The signals of the first step that have a weight; None for those that have ``begun`` elsewhere. Does
    not wait for the device: `attention` comes first, which computes while the host makes the others."""
    wanted = weights(evidence.options.experimental, retrieved=evidence.scores is not None)
    return {
        name: None if name in begun else _signal(evidence, name) for name, weight in wanted.items() if weight
    }


def fused(evidence: Evidence, scores: Scores | None = None) -> torch.Tensor:
    """f32 [S]: the weighted mean of the signals that the request has, and `feedback` from it; zeros
    without any. ``scores``: those of `scored`, if they have been made."""
    total, _, added = _summed(evidence, scored(evidence) if scores is None else scores)
    return total if added is None else total + added


def contributions(evidence: Evidence) -> dict[str, torch.Tensor]:
    """What each signal adds to `fused`, f32 [S] by name; `feedback` last, where it has a weight."""
    _, parts, added = _summed(evidence, scored(evidence))
    return parts if added is None else parts | {"feedback": added}


def _summed(
    evidence: Evidence, scores: Scores
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]:
    """The mean of the first step's signals, each one's part of it, and what `feedback` adds."""
    wanted = weights(evidence.options.experimental, retrieved=evidence.scores is not None)
    parts = {name: wanted[name] * score.cpu() for name, score in scores.items() if score is not None}
    found = sum(wanted[name] for name in parts)
    total = torch.zeros(len(evidence.sentences))
    for part in parts.values():
        total = total + part
    total = total / found if found else total
    parts = {name: part / found for name, part in parts.items()}
    follow = evidence.options.experimental.feedback_weight
    return total, parts, follow * feedback(evidence, total) if follow else None


def _signal(evidence: Evidence, name: str) -> torch.Tensor | None:
    return evidence.known[name] if name in evidence.known else SIGNALS[name](evidence)
