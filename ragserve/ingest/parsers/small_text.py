"""Raised and lowered characters, struck-out text: markup whose loss would change what a text says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

_SIMPLE = re.compile(r"[-+−–]?[\w.,*°′″†‡§∞]+[-+−]?|[-+−]")
_NUMBERS = re.compile(r"\d{1,3}(?:\s?,\s?\d{1,3})*+")
_BEHIND_TEXT = re.compile(r"(?:[^\W\d_]{4}|[.,;:!?”’\"»])\Z")  # a unit is shorter
_ORDINALS = frozenset(["st", "nd", "rd", "th", "er", "re", "ère", "ème", "eme", "tm", "sm", "ª", "º"])


def raised(text: str) -> str:
    """Text as a superscript: ``^6``, ``^(n + 1)``. Endings of ordinals, such as of 1st, stay as they are."""
    return text if text.strip().lower() in _ORDINALS else _marked("^", text)


def lowered(text: str) -> str:
    """Text as a subscript: ``_1``, ``_(i + 1)``."""
    return _marked("_", text)


def struck(text: str) -> str:
    """Text that was struck out, and so does not hold."""
    return _spaced(text, lambda inner: f"~~{inner}~~")


def _marked(mark: str, text: str) -> str:
    return _spaced(text, lambda inner: mark + (inner if _SIMPLE.fullmatch(inner) else f"({inner})"))


def _spaced(text: str, change: Callable[[str], str]) -> str:
    """The text changed, with the white space at its ends where it was."""
    inner = text.strip()
    if not inner:
        return text
    start = text.index(inner)
    return text[:start] + change(inner) + text[start + len(inner) :]


class Run(NamedTuple):
    """Text of one look. ``place`` is 1 for superscripts and -1 for subscripts."""

    text: str
    place: int = 0
    struck: bool = False


def joined_runs(runs: Iterable[Run]) -> str:
    """The text of runs in order; runs of one look share their mark."""
    parts = []
    for is_struck, alike in groupby(runs, lambda run: run.struck):
        grouped = groupby(alike, lambda run: run.place)
        text = _marked_runs([(place, "".join(run.text for run in group)) for place, group in grouped])
        parts.append(struck(text) if is_struck else text)
    return "".join(parts)


def _marked_runs(runs: list[tuple[int, str]]) -> str:
    """Texts with marks for their places; a raised number, a stroke and a lowered number are a fraction."""
    out, at = "", 0
    while at < len(runs):
        place, text = runs[at]
        following = runs[at + 1 : at + 3]
        if place > 0 and [each for each, _ in following] == [0, -1] and following[0][1] in ("/", "⁄"):
            out += f"{' ' if out[-1:].isdigit() else ''}{text}/{following[1][1]}"
            at += 3
            continue
        out += raised(text) if place > 0 else lowered(text) if place < 0 else text
        at += 1
    return out


def raised_behind(before: str, text: str) -> str:
    """`raised` text behind ``before``: a number behind a word or a sentence is that of a note, ``[3]``."""
    inner = text.strip()
    if inner[:1] == "[" or not any(map(str.isalnum, inner)):
        return text
    if _NUMBERS.fullmatch(inner) and _BEHIND_TEXT.search(before[-8:]):
        return text.replace(inner, f"[{inner}]", 1)
    return text.replace(inner, "^" + inner, 1) if inner[:1] == "(" else raised(text)
