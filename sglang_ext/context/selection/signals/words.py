"""Signal `words`: the question's words in a sentence."""

from __future__ import annotations

import math

import numpy as np
import torch

from sglang_ext.context.selection.signals.base import Evidence, scaled


def words(evidence: Evidence) -> torch.Tensor:
    """Sum over the question's terms in a sentence of log(sentences / sentences with the term), over the
    largest sum: BM25's idf, without its length terms."""
    count = len(evidence.sentences)
    score = np.zeros(count, dtype=np.float32)
    for held in evidence.terms.holding(evidence.asked):
        if len(held):
            score[held] += math.log(count / len(held))
    return scaled(torch.from_numpy(score))
