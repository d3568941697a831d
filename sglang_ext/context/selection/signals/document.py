"""Signal `document`: the retriever's score of the passage that a sentence stands in."""

from __future__ import annotations

import torch

from sglang_ext.context.selection.signals.base import Evidence, calibrated
from sglang_ext.protocol import RetrievalScores


def document(evidence: Evidence) -> torch.Tensor | None:
    """Calibrated cosines of the passages. A passage without a score counts as the lowest that has one."""
    found = document_prior(evidence.scores, 1.0)
    return None if found is None else evidence.spread(found)


def document_prior(scores: RetrievalScores | None, power: float) -> torch.Tensor | None:
    """f32 [D]: the passages' calibrated cosines to a power; None without scores, and for power 0."""
    given = () if scores is None else scores.documents
    known = [score for score in given if score is not None]
    if not known or not power:
        return None
    cosines = torch.tensor([min(known) if score is None else score for score in given])
    return calibrated(cosines) ** power
