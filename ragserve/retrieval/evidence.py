"""Whether the passages that a search found seem to answer the question, before a model is asked.

Three signals of the five best candidates: how near the best one is to the question, how far it stands out
from their mean, and the largest share of the question's words that one has, where a word counts the more, the
fewer chunks of the namespace have it. Near passages alone say little: questions about something that the
documents do not have find passages of the same subject. Their weights are those of a logistic regression over
questions with their passages, and the same without them (benchmarks/not_found.py). They belong to an
embedder; a lexical search has its own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ragserve.linked_passages import UNSPACED, read_words
from ragserve.retrieval.stop_words import STOP_WORDS
from ragserve.setting_groups.answering import Retrieval

if TYPE_CHECKING:
    from ragserve_index.types import Hit

DEPTH = 5  # candidates that are compared; of fewer nothing is said
_WORD = re.compile(rf"[{UNSPACED}]{{1,2}}|[^\W{UNSPACED}]+")
_BM25 = 2.2  # what a word of weight 1 adds to BM25 at most
_SHOWN = 5  # missing words


class Signals(NamedTuple):
    """``best``: cosine, or in a lexical search BM25 as a share of the most there can be; ``gap``: its
    distance to the mean of all; ``covered``: largest share of the question's words in one passage, by their
    rarity."""

    best: float
    gap: float
    covered: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """``score`` is negative where the passages do not seem to answer; ``reason`` then says why."""

    score: float
    reason: str

    @property
    def likely(self) -> bool:
        """Whether the passages seem to answer."""
        return self.score >= 0


_WEIGHTS: Mapping[tuple[str, Retrieval], tuple[float, float, float, float]] = {
    ("all-MiniLM-L6-v2", "dense"): (3.42, 12.17, 4.56, -4.11),
    ("all-MiniLM-L6-v2", "hybrid"): (4.82, 10.37, 4.87, -5.21),
    ("", "lexical"): (0.0, 14.05, 3.35, -1.72),
}
"""By embedder and search: the weights of the signals, and the score of nothing."""


def words_of(question: str) -> list[str]:
    """The words of a question that say what it is about, in lower case, each once; of scripts that do not
    separate words, pairs of characters."""
    words = dict.fromkeys(word.lower() for word in _WORD.findall(question))
    return [word for word in words if word not in STOP_WORDS]


def can_judge(embedder: str, retrieval: Retrieval) -> bool:
    """Whether there are weights for searches of this kind."""
    return _key(embedder, retrieval) in _WEIGHTS


def signals(
    candidates: Sequence[Hit], retrieval: Retrieval, counts: Mapping[str, int], n_chunks: int
) -> tuple[Signals, list[str]]:
    """The signals, and the question's words that no candidate has, the rarest first.

    ``candidates``: the `DEPTH` best. ``counts``: of the question's `words_of` the number of chunks that have
    it, of ``n_chunks``."""
    rarity = {word: math.log1p(n_chunks / max(0.5, n)) for word, n in counts.items()}
    total = sum(rarity.values()) or 1.0
    held = [_terms(f"{p.chunk.title}\n{p.chunk.text}") for p in candidates]
    terms = {word: _terms(word) for word in rarity}
    covered = max(sum(rarity[word] for word in rarity if terms[word] <= own) for own in held) / total
    missing = [word for word in rarity if not any(terms[word] <= own for own in held)]
    missing.sort(key=lambda word: -rarity[word])
    if retrieval == "lexical":
        values = [(p.bm25 or 0.0) / (_BM25 * total) for p in candidates]
    else:
        values = [p.cosine or 0.0 for p in candidates]
    best = max(values)
    return Signals(best, best - sum(values) / len(values), covered), missing


def judged(found: Signals, missing: Sequence[str], embedder: str, retrieval: Retrieval) -> Judgement:
    """Judge by the signals of a search for which `can_judge` holds."""
    *weights, nothing = _WEIGHTS[_key(embedder, retrieval)]
    score = nothing + sum(weight * value for weight, value in zip(weights, found, strict=True))
    if score >= 0:
        return Judgement(score, "")
    if missing:
        return Judgement(score, f"no passage has {', '.join(missing[:_SHOWN])}")
    name = "BM25" if retrieval == "lexical" else "cosine"
    return Judgement(score, f"no passage stands out (best {name} {found.best:.2f})")


def _terms(text: str) -> set[str]:
    return {term.rstrip("s") for term in read_words(text).counts}  # "cost" is in "costs"


def _key(embedder: str, retrieval: Retrieval) -> tuple[str, Retrieval]:
    return ("" if retrieval == "lexical" else embedder), retrieval
