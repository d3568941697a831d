"""Markers ``[n]`` in the text of an answer.

A marker is ``[n]`` with one to three digits (context passages are numbered 1..k, k is below 1000; ``[2024]``
is text). Markers that point to no passage are removed before text reaches a client, with the blanks before
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Basis = Literal["marker", "quote", "words"]
_MAX_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Marker:
    """A valid marker: ``answer[start:end] == f"[{index}]"``, ``index`` counts context passages from 1."""

    index: int
    start: int
    end: int


class MarkerFilter:
    """Trims a stream of text and removes markers that point to no passage.

    The output does not depend on how the text is split into deltas. Only a possible marker is held back, and
    white space, which may precede a removed marker or end the answer."""

    def __init__(self, n_passages: int) -> None:
        self._n_passages = n_passages
        self._pending = ""  # white space, "[" and "[ddd": may still become part of a marker
        self._sent = 0  # characters returned; 0 while only white space has come
        self.markers: list[Marker] = []

    def feed(self, delta: str) -> str:
        """Return the text that is final after ``delta``; may be empty."""
        out: list[str] = []
        for character in delta:
            digits = self._open_digits()
            if character == "]" and digits:
                index = int(digits)
                if 1 <= index <= self._n_passages:
                    self._release(character, out)
                    self.markers.append(Marker(index, self._sent - len(digits) - 2, self._sent))
                else:
                    self._pending = self._pending[: -len(digits) - 1].rstrip(" \t")
            elif character in "0123456789":
                if digits is not None and len(digits) < _MAX_DIGITS:
                    self._pending += character
                else:
                    self._release(character, out)
            elif character == "[" or character.isspace():
                self._pending += character
            else:
                self._release(character, out)
        return "".join(out)

    def end(self) -> str:
        """Return the pending text at the end of the stream, without trailing white space."""
        self._pending = self._pending.rstrip()
        out: list[str] = []
        self._release("", out)
        return out[0]

    def _open_digits(self) -> str | None:
        """Digits after an open bracket at the end of the pending text; None without an open bracket."""
        _, bracket, digits = self._pending.rpartition("[")
        return digits if bracket and not digits.strip("0123456789") else None

    def _release(self, character: str, out: list[str]) -> None:
        text, self._pending = self._pending + character, ""
        if not self._sent:
            text = text.lstrip()
        self._sent += len(text)
        out.append(text)
