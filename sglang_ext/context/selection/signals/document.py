"""Signal `document`: the retriever's score of the passage that a sentence stands in."""

from __future__ import annotations

import torch

from sglang_ext.context.selection.signals.base import Evidence, calibrated
from sglang_ext.wire.protocol import RetrievalScores


def document(evidence: Evidence) -> torch.Tensor | None:
    """Calibrated cosines of the passages. A passage without a score counts as the lowest that has one.

    A passage that names no subject of its own (`DocumentTerms.names_itself`) has at least option
    `continuation_weight` of the score of the passage before it."""
    found = document_prior(evidence.scores, 1.0)
    if found is None:
        return None
    weight = evidence.options.experimental.continuation_weight
    if weight:
        score = found.tolist()
        for number, names_itself in enumerate(evidence.terms.name_themselves):
            if number and not names_itself:
                score[number] = max(score[number], weight * score[number - 1])
        found = torch.tensor(score)
    return evidence.spread(found)


def document_prior(scores: RetrievalScores | None, power: float) -> torch.Tensor | None:
    """f32 [D]: the passages' calibrated cosines to a power; None without scores, and for power 0."""
    given = () if scores is None else scores.documents
    known = [score for score in given if score is not None]
    if not known or not power:
        return None
    cosines = torch.tensor([min(known) if score is None else score for score in given])
    return calibrated(cosines) ** power
