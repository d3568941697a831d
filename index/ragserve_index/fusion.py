"""Fusion of a dense and a lexical ranking by reciprocal rank (Cormack, Clarke and Buettcher, SIGIR 2009):
score(d) = sum over the rankings that have d of 1 / (60 + rank of d). Lexical rankings of several wordings of
one question have scores of one kind, and are fused by their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

K = 60  # of the paper, not tuned
DEPTH = 100  # ranks of each list that count


class Ranked(NamedTuple):
    """A chunk with the score that orders it, and those of the searches that found it."""

    chunk_id: int
    score: float
    cosine: float | None
    bm25: float | None


def by_reciprocal_rank(
    dense: Sequence[tuple[int, float]], lexical: Sequence[tuple[int, float]]
) -> list[Ranked]:
    """Fuse two rankings of (chunk id, score), best first. Of equals the one of the better cosine is first."""
    cosine, bm25 = dict(dense), dict(lexical)
    fused: dict[int, float] = {}
    for ranking in (dense, lexical):
        for rank, (chunk, _) in enumerate(ranking, 1):
            fused[chunk] = fused.get(chunk, 0.0) + 1 / (K + rank)
    order = sorted(fused, key=lambda chunk: (-fused[chunk], -cosine.get(chunk, -1.0), chunk))
    return [Ranked(chunk, fused[chunk], cosine.get(chunk), bm25.get(chunk)) for chunk in order]


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
