"""The sentences of an answer, with the markers that belong to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ragserve.answering.citations import Marker
from sglang_ext.wire.sentence_ends import sentence_ends

_SHORTEST = 12  # characters: "Mr.", "No. 5" and the number of a list's item go on


def sentences(answer: str, markers: Sequence[Marker] = ()) -> list[tuple[int, int]]:
    """First character and the one after the last of each sentence, without white space around it.

    Markers at the beginning of a sentence belong to the one before: "Alan built it. [1] It was lit"."""
    starts = [0]
    for cut in sentence_ends(answer):
        if cut <= starts[-1]:
            continue  # within markers
        if len(answer[starts[-1] : cut].strip()) >= _SHORTEST or answer[cut - 1] == "\n":
            starts.append(_behind(answer, cut, markers))
    starts = [start for start in dict.fromkeys(starts) if answer[start:].strip()]
    return list(_trimmed(answer, [*starts, len(answer)]))


def _behind(answer: str, at: int, markers: Sequence[Marker]) -> int:
    """The place behind the markers that stand at ``at``."""
    for marker in markers:
        if marker.start >= at and not answer[at : marker.start].strip():
            at = marker.end
    return at


def _trimmed(answer: str, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    for start, end in pairwise(cuts):
        text = answer[start:end]
        if text.strip():
            yield start + len(text) - len(text.lstrip()), start + len(text.rstrip())
