"""Which passages an answer rests on: markers ``[n]`` in its text, and what to cite where there are none.

A marker is ``[n]`` with one to three digits (context passages are numbered 1..k, k is below 1000; ``[2024]``
is text). Markers that point to no passage are removed before anything reaches a client, together with the
blanks in front of them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Basis = Literal["marker", "quote", "context"]
_MAX_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Marker:
    """A valid marker: ``answer[start:end] == f"[{index}]"``, ``index`` counts context passages from 1."""

    index: int
    start: int
    end: int


class MarkerFilter:
    """Removes markers that point nowhere from a stream of text, and trims it.

    Works character by character on what could still become a marker, so the output is the same however the
    text is split into deltas. Nothing else is held back but white space, which may precede a marker that
    goes, or end the answer."""

    def __init__(self, n_passages: int) -> None:
        self._n_passages = n_passages
        self._held = ""  # white space, "[" and "[ddd": everything a later character can still turn into part of a marker
        self._sent = 0  # characters given out; 0 while only white space has come
        self.markers: list[Marker] = []

    def feed(self, delta: str) -> str:
        """The text that is final after ``delta``; may be empty."""
        out: list[str] = []
        for character in delta:
            digits = self._open_digits()
            if character == "]" and digits:
                index = int(digits)
                if 1 <= index <= self._n_passages:
                    self._release(character, out)
                    self.markers.append(Marker(index, self._sent - len(digits) - 2, self._sent))
                else:
                    self._held = self._held[: -len(digits) - 1].rstrip(" \t")
            elif character in "0123456789":
                if digits is not None and len(digits) < _MAX_DIGITS:
                    self._held += character
                else:
                    self._release(character, out)
            elif character == "[" or character.isspace():
                self._held += character
            else:
                self._release(character, out)
        return "".join(out)

    def end(self) -> str:
        """What was held back, now that nothing follows; without trailing white space."""
        text, self._held = self._held.rstrip(), ""
        if not self._sent:
            text = text.lstrip()
        self._sent += len(text)
        return text

    def _open_digits(self) -> str | None:
        """The digits after a ``[`` that ends the held text; empty right after it, None where there is no open
        bracket.
        """
        position = len(self._held)
        while position and self._held[position - 1] in "0123456789":
            position -= 1
        return self._held[position:] if position and self._held[position - 1] == "[" else None

    def _release(self, character: str, out: list[str]) -> None:
        text = self._held + character
        self._held = ""
        if not self._sent:
            text = text.lstrip()
        self._sent += len(text)
        out.append(text)


def cite(answer: str, markers: Sequence[Marker], passages: Sequence[str]) -> tuple[list[int], Basis]:
    """Numbers (from 1, ascending) of the passages to cite, and why these.

    ``marker``: those the answer names. Without markers, ``quote``: those that contain the answer verbatim, up
    to case, white space, Unicode compatibility forms and outer punctuation. Where none does, ``context``: all
    that the model was given."""
    if markers:
        return sorted({marker.index for marker in markers}), "marker"
    wanted = _normalised(answer).strip(" .,;:!?\"'()[]“”‘’")
    if wanted:
        # as whole words: the answer "Al" is not quoted by "also"
        pattern = re.compile(rf"(?<!\w){re.escape(wanted)}(?!\w)")
        quoting = [index for index, text in enumerate(passages, 1) if pattern.search(_normalised(text))]
        if quoting:
            return quoting, "quote"
    return list(range(1, len(passages) + 1)), "context"


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
