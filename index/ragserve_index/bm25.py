"""BM25 as FTS5 and `postgres.full_text` score it, and the same over several namespaces as over one.

Each lexical index scores with the statistics of its own namespace: how many chunks have a word, and how long
chunks are on average. Scores of two namespaces cannot be compared, so the candidates of each are scored anew
with the statistics of all namespaces together. How often a chunk has a word follows from the score that its
index gives it for that word alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

K1, B = 1.2, 0.75
LEAST = 1e-6  # weight of a word that is in half of the chunks, or more


def weight(n_chunks: int, n: int) -> float:
    """Inverse document frequency of a word that ``n`` of ``n_chunks`` have. ``n`` may exceed ``n_chunks``: it
    may have been counted before removals."""
    return log((n_chunks - n + 0.5) / (n + 0.5)) if 2 * n < n_chunks else LEAST


def large_weight(n_chunks: int, n: int) -> float:
    """The same as tantivy has it, which scores large namespaces."""
    return log(1 + (max(0, n_chunks - n) + 0.5) / (n + 0.5))


@dataclass(frozen=True, slots=True)
class WordScores:
    """What one index says of one word: its ``weight`` there, and BM25 of the candidates that have it."""

    weight: float
    scores: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class PartCandidates:
    """The candidates of one namespace: their ``lengths`` in words, the mean over the namespace, and the
    scores of each word of the question."""

    lengths: Mapping[int, int]
    mean_length: float
    words: Sequence[WordScores]


def joint_scores(
    parts: Sequence[PartCandidates], weights: Sequence[float], mean_length: float
) -> dict[int, float]:
    """BM25 of all candidates, with each word's weight and the mean length of all namespaces together; 0 for
    one that has none of the words."""
    found: dict[int, float] = {}
    for part in parts:
        own = dict.fromkeys(part.lengths, 0.0)
        for in_index, joint in zip(part.words, weights, strict=True):
            for chunk, score in in_index.scores.items():
                if chunk in own:
                    length = part.lengths[chunk]
                    times = _times(score / in_index.weight, length, part.mean_length)
                    own[chunk] += joint * times * (K1 + 1) / (times + _norm(length, mean_length))
        found |= own
    return found


def _times(score: float, length: int, mean_length: float) -> int:
    """How often a chunk has a word that weighs 1 and gives it this score. Whole numbers: tantivy rounds
    lengths, so its scores only come near."""
    share = min(score / (K1 + 1), 1 - 1e-6)
    return max(1, min(round(_norm(length, mean_length) * share / (1 - share)), max(1, length)))


def _norm(length: int, mean_length: float) -> float:
    return K1 * (1 - B + B * length / max(mean_length, 1e-9))
