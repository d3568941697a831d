"""Signals that score the sentences of a context, and their sum: docs/composed-contexts.md."""

from __future__ import annotations

import torch

from sglang_ext.context.selection.signals.attention import attention
from sglang_ext.context.selection.signals.base import Evidence, Signal
from sglang_ext.context.selection.signals.document import document
from sglang_ext.context.selection.signals.feedback import feedback
from sglang_ext.context.selection.signals.sentence import sentence
from sglang_ext.context.selection.signals.words import words
from sglang_ext.request_options import SamKvExperiment

__all__ = ["SIGNALS", "Evidence", "fused"]

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


def fused(evidence: Evidence) -> torch.Tensor:
    """f32 [sentences]: the weighted mean of the signals that the request has, and `feedback` from it; zeros
    without any."""
    total, found = torch.zeros(evidence.sentences), 0.0
    retrieved = evidence.scores is not None
    for name, weight in weights(evidence.options.experimental, retrieved=retrieved).items():
        score = _signal(evidence, name) if weight else None
        if score is not None:
            total, found = total + weight * score, found + weight
    total = total / found if found else total
    follow = evidence.options.experimental.feedback_weight
    return total + follow * feedback(evidence, total) if follow else total


def _signal(evidence: Evidence, name: str) -> torch.Tensor | None:
    return evidence.known[name] if name in evidence.known else SIGNALS[name](evidence)
