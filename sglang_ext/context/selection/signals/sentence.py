"""Signal `sentence`: the retriever's scores of the sentences that were embedded at ingestion."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from sglang_ext.context.selection.signals.base import Evidence, calibrated


def sentence(evidence: Evidence) -> torch.Tensor | None:
    """Calibrated cosines of the sentences.

    Ingestion cuts characters and the engine tokens, so their sentences may differ: one of the engine's has
    the highest score of its tokens. A document without scores counts as the lowest that has one, and so do
    tokens before its first."""
    given = () if evidence.scores is None else evidence.scores.sentences
    pairs = list(chain.from_iterable(given))
    if not pairs:
        return None
    places, cosines = (np.array(values) for values in zip(*pairs, strict=True))
    sentences = evidence.sentences
    counts = np.array([len(own) for own in given])
    begin = places + np.repeat(sentences.first, counts)
    documents = counts.cumsum() - counts  # the number of each one's first pair
    begin = np.insert(begin, documents, sentences.first)
    cosines = np.insert(cosines, documents, cosines.min())
    token = np.repeat(cosines.astype(np.float32), np.diff(begin, append=sentences.tokens))
    return calibrated(sentences.best(torch.from_numpy(token)))
