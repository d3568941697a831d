"""Fusion of a dense and a lexical search by their scores: the sum of both standard scores.

Cosines and BM25 have different ranges, which also differ from question to question. Each is divided by its
standard deviation over the candidates of the question, so that both order them with the same force, and a
search that tells its candidates apart by little is not read as one that tells them apart by much. Ranks have
lost that: of two searches the weaker one then counts as much as the better one. Lexical rankings of several
wordings of one question have scores of one kind, and are fused by their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ragserve_index.structures.base import Floats

DEPTH = 100  # candidates of each search


class Ranked(NamedTuple):
    """A chunk with the score that orders it, and those of the searches."""

    chunk_id: int
    score: float
    cosine: float | None
    bm25: float | None


def by_standard_scores(cosines: Mapping[int, float], bm25: Mapping[int, float]) -> list[Ranked]:
    """Order candidates, best first. All have a cosine; BM25 is 0 for those that the lexical search did not
    find. Of equals the one of the better cosine is first."""
    ids = list(cosines)
    scores = _standard([cosines[i] for i in ids]) + _standard([bm25.get(i, 0.0) for i in ids])
    ranked = [
        Ranked(i, score, cosines[i], bm25.get(i)) for i, score in zip(ids, scores.tolist(), strict=True)
    ]
    return sorted(ranked, key=lambda one: (-one.score, -cosines[one.chunk_id], one.chunk_id))


def _standard(values: Sequence[float]) -> Floats:
    """Distances from the mean in standard deviations; zeros where all are equal."""
    numbers = np.asarray(values, dtype=np.float64)
    deviation = numbers.std() if len(numbers) else 0.0
    if deviation <= 1e-9:
        return np.zeros_like(numbers)
    standard: Floats = (numbers - numbers.mean()) / deviation
    return standard


def by_mean_score(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Fuse rankings of (chunk id, score) by the mean score, best first. The first ranking counts as much as
    all others together; a chunk that a ranking lacks has score 0 there."""
    others = len(rankings) - 1
    weights = [0.5, *[0.5 / others] * others] if others else [1.0]
    fused: dict[int, float] = {}
    for weight, ranking in zip(weights, rankings, strict=True):
        for chunk, score in ranking:
            fused[chunk] = fused.get(chunk, 0.0) + weight * score
    return sorted(fused.items(), key=lambda one: (-one[1], one[0]))
