"""Find near copies among passages by the word triples that they share."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"\w+")
_WORDS = 3  # of a shingle: two passages on one subject share many words, but few triples


def without_copies(texts: Sequence[str], threshold: float) -> list[int]:
    """Return the places of the texts that are no copies of one before them, in order.

    A copy shares at least ``threshold`` of the triples of both (Jaccard's index)."""
    kept: list[tuple[int, frozenset[tuple[str, ...]]]] = []
    for place, text in enumerate(texts):
        own = shingles(text)
        if not any(_similarity(own, other) >= threshold for _, other in kept):
            kept.append((place, own))
    return [place for place, _ in kept]


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """All runs of three words without case; the whole of a shorter text."""
    words = _WORD.findall(text.casefold())
    runs = range(max(1, len(words) - _WORDS + 1))
    return frozenset(tuple(words[at : at + _WORDS]) for at in runs)


def _similarity(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common)
