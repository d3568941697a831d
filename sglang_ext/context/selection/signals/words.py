"""Signal `words`: the question's words in a sentence."""

from __future__ import annotations

import math

import torch

from sglang_ext.context.selection.signals.base import Evidence, scaled


def words(evidence: Evidence) -> torch.Tensor:
    """Sum over the question's terms in a sentence of log(sentences / sentences with the term), over the
    largest sum: BM25's idf, without its length terms."""
    count = evidence.sentences
    score = torch.zeros(count)
    for term in evidence.asked:
        held = evidence.holding(term)
        if held:
            score[held] += math.log(count / len(held))
    return scaled(score)
