"""Signal `sentence`: the retriever's scores of the sentences that were embedded at ingestion."""

from __future__ import annotations

import torch

from sglang_ext.context.selection.sentences import max_per_sentence
from sglang_ext.context.selection.signals.base import Evidence, calibrated


def sentence(evidence: Evidence) -> torch.Tensor | None:
    """Calibrated cosines of the sentences.

    Ingestion cuts characters and the engine tokens, so their sentences may differ: one of the engine's has
    the highest score of its tokens. A document without scores counts as the lowest that has one."""
    scores = evidence.scores
    known = [score for one in scores.sentences for _, score in one] if scores else []
    if scores is None or not known:
        return None
    token = torch.full((len(evidence.sentence),), min(known))
    documents = zip(evidence.first.tolist(), evidence.analyses, scores.sentences, strict=True)
    for start, analysis, pairs in documents:
        if not pairs:
            continue
        places, cosines = zip(*pairs, strict=True)
        lengths = torch.tensor([*places, analysis.n_tokens]).diff()
        own = torch.repeat_interleave(torch.tensor(cosines), lengths)
        token[start + places[0] : start + analysis.n_tokens] = own
    return calibrated(max_per_sentence(token, evidence.sentence))
