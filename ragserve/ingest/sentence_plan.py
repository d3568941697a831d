"""Cut a chunk's text into the sentences that are embedded beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ragserve.ingest.graphemes import grapheme_start
from ragserve_index.sentence_vectors import SentenceVectors
from sglang_ext.wire.sentence_ends import sentence_ends

_COMMAS = "\uff0c\u3001\uff1b\uff1a"  # of texts without spaces
_SHORTEST, _LONGEST = 40, 320  # characters: less says little by itself, more is several statements


class SentencePlan:
    """The sentences to embed of some chunks, within a budget of stored bytes.

    ``texts``: all of them, in order."""

    def __init__(self, chunks: Sequence[tuple[str, int]], dim: int, bytes_per_token: int) -> None:
        """``chunks``: text and tokens of each. A chunk has at least one sentence, without a budget none."""
        each = SentenceVectors.bytes_each(dim)
        self._starts = [
            sentence_starts(text, max(1, n_tokens * bytes_per_token // each)) if bytes_per_token else []
            for text, n_tokens in chunks
        ]
        self.texts = [
            text[start:end]
            for (text, _), starts in zip(chunks, self._starts, strict=True)
            for start, end in pairwise([*starts, len(text)])
        ]

    def vectors(self, embedded: npt.NDArray[np.float32]) -> list[SentenceVectors | None]:
        """The chunks' sentences with their vectors; ``embedded`` [len(texts), dim]."""
        found: list[SentenceVectors | None] = []
        at = 0
        for starts in self._starts:
            own = embedded[at : at + len(starts)]
            found.append(SentenceVectors.of(starts, own) if starts else None)
            at += len(starts)
        return found


def sentence_starts(text: str, most: int) -> list[int]:
    """Where the sentences of a text begin, the first at 0: ``most`` of them at most.

    Short ones are joined with the next until they are few enough, long ones are cut at a space."""
    least = _SHORTEST
    while True:
        starts = _joined(text, least)
        if len(starts) <= most:
            return starts
        least = least * 3 // 2


def _joined(text: str, least: int) -> list[int]:
    """Starts of sentences of ``least`` characters or more, except for the last."""
    longest = max(_LONGEST, 2 * least)
    starts = [0]
    for end in [*(_behind_space(text, end) for end in sentence_ends(text)), len(text)]:
        while end - starts[-1] > longest:
            starts.append(_cut(text, starts[-1] + least, starts[-1] + longest))
        if least <= end - starts[-1] and end < len(text):
            starts.append(end)
    return starts


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _cut(text: str, first: int, last: int) -> int:
    """Where to cut a long sentence: behind the last space, else the last comma, else between characters."""
    for mark in (" ", *_COMMAS):
        at = text.rfind(mark, first, last)
        if at > 0:
            return at + 1
    return max(first, grapheme_start(text, last))
