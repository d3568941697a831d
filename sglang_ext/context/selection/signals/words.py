"""Signal `words`: the question's words in a sentence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.context.selection.signals.base import Evidence, scaled
from sglang_ext.tensors.buffers import Ints


def words(evidence: Evidence) -> torch.Tensor:
    """Sum over the question's terms in a sentence of log(sentences / sentences with the term), over the
    largest sum: BM25's idf, without its length terms."""
    held, counts = evidence.terms.holding(evidence.asked)
    found = np.bincount(held, np.repeat(rarity(evidence, counts), counts), len(evidence.sentences))
    return scaled(torch.from_numpy(found).float())


def rarity(evidence: Evidence, counts: Ints) -> npt.NDArray[np.float64]:
    """log(sentences / sentences with a term), by the number of the latter; 0 where there is none."""
    return np.log(len(evidence.sentences) / counts.clip(min=1)) * (counts > 0)
