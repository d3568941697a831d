"""Sentences that go on over the end of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

_LONGEST = 600  # characters of a sentence on its first page
_WORDS, _WORDS_BEFORE_CAPITAL = 3, 5  # of it there: fewer are headings and labels
_FULL_LINE = 20  # characters; shorter lines before the last one are a list
_CASELESS = 12  # characters, of scripts that do not separate words
_END = re.compile(
    r"[.!?:;…][\"'”’»)\]]*+(?=\s)|[。！？]|\n(?=[ \t]*+(?:[-*•#|]|\d{1,3}[.)])\s)|\n(?=[ \t]*+\n)"
)
_CLOSED = re.compile(r"[.!?:;…。！？|][\"'”’»)\]]*+\Z")


def sentences_over_pages(text: str, pages: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """Yield the offset of each page that begins within a sentence, and the sentence's beginning, one line
    that ends before the page's text. ``pages``: see `parsers.Parsed`; only pages that follow each other
    count."""
    for (before, number), (start, following) in pairwise(pages):
        if following == number + 1 and (lead := _beginning(text[max(before, start - _LONGEST) : start])):
            line = " ".join(lead.split())
            if _goes_on(line, text[start : start + 40]):
                yield start, line if line.endswith(("-", "‐")) else f"{line} "


def sentence_end(text: str, start: int, end: int) -> int:
    """Offset behind the sentence that begins at ``start``, or ``end``."""
    found = _END.search(text, start, min(end, start + 2 * _LONGEST))
    if found is None:
        return end
    stop = found.end()
    while stop < end and text[stop].isspace():
        stop += 1
    return stop


def _beginning(tail: str) -> str:
    """The sentence that is not ended at the end of a page; empty if there is none, or a very long one."""
    tail = tail.rstrip()
    if not tail or _CLOSED.search(tail[-8:]):
        return ""
    ends = [found.end() for found in _END.finditer(tail)]
    if not ends and len(tail) > _LONGEST - 20:
        return ""
    lines = tail[ends[-1] if ends else 0 :].strip().split("\n")
    short = [at for at, line in enumerate(lines[:-1]) if len(line) < _FULL_LINE]
    return "\n".join(lines[short[-1] + 1 if short else 0 :])


def _goes_on(lead: str, following: str) -> bool:
    """Return whether a page's first words go on with what the page before has not ended."""
    if "|" in lead or following.startswith(("|", "#", "-", "*", "•")):
        return False
    first = next((letter for letter in following if letter.isalnum()), "")
    n_words = len(lead.split())
    if first.islower():
        return n_words >= _WORDS
    if first.isalpha() and not first.isupper():  # a script without cases
        return len(lead) >= _CASELESS
    return n_words >= _WORDS_BEFORE_CAPITAL and (lead[-1].islower() or lead[-1] == ",")
