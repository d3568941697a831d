"""Quality of a ranked list against relevance judgements, as trec_eval and BEIR compute it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def ndcg(ranking: Sequence[str], judged: Mapping[str, int], k: int) -> float:
    """nDCG@k in [0, 1] with linear gain: DCG = sum of rel_i / log2(i + 1) over ranks i = 1..k, divided by
    that of the best order.

    A document without judgement has gain 0. Returns 0.0 if nothing was judged relevant."""
    ideal = _dcg(sorted((max(0, gain) for gain in judged.values()), reverse=True)[:k])
    return _dcg([max(0, judged.get(doc, 0)) for doc in ranking[:k]]) / ideal if ideal else 0.0


def recall(ranking: Sequence[str], judged: Mapping[str, int], k: int) -> float:
    """Share of the relevant documents (gain above 0) among the first k; 0.0 if nothing was judged
    relevant."""
    relevant = {doc for doc, gain in judged.items() if gain > 0}
    return len(relevant & set(ranking[:k])) / len(relevant) if relevant else 0.0


def reciprocal_rank(ranking: Sequence[str], judged: Mapping[str, int]) -> float:
    """1 / the rank of the first relevant document (gain above 0); 0.0 if there is none."""
    return next((1 / rank for rank, doc in enumerate(ranking, 1) if judged.get(doc, 0) > 0), 0.0)


def _dcg(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))
