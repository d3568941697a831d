"""Sentences that go on over the end of a page."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise

from sglang_ext.wire.sentence_ends import ALONE, CLOSING, SPACED

_LONGEST = 600  # characters of a sentence on its first page
_NOTES = 1500  # characters at the end of a page that may be footnotes
_WORDS, _WORDS_BEFORE_CAPITAL = 3, 5  # of it there: fewer are headings and labels
_FULL_LINE = 20  # characters; shorter lines before the last one are a list
_CASELESS = 12  # characters, of scripts that do not separate words
_END = re.compile(  # also clauses, lists and paragraphs
    rf"[{SPACED}:;…][{CLOSING}]*+(?=\s)|[{ALONE}]++[{CLOSING}]*+"
    r"|\n(?=[ \t]*+(?:[-*•#|]|\d{1,3}[.)])\s)|\n(?=[ \t]*+\n)"
)
# a footnote's mark at the beginning of a line, or alone on it if it is raised, and the first letter behind it
_NOTE = re.compile(
    r"\n[ \t]*+\[?+(\d{1,2}|[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,2}|\*{1,3}|[†‡§]{1,2})\]?+"
    r"[ \t]?+(?:\n[ \t]?+)?+[\"“„«]?+([^\W\d_])"
)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_CLOSED = re.compile(rf"[{SPACED}{ALONE}:;…|][{CLOSING}]*+\Z")


def sentences_over_pages(text: str, pages: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """Yield the offset of each page that begins within a sentence, and the sentence's beginning, one line
    that ends before the page's text. Footnotes below it are not part of it. ``pages``: see `parsers.Parsed`;
    only pages that follow each other count."""
    for (before, number), (start, following) in pairwise(pages):
        if following != number + 1:
            continue
        first = text[start : start + 40]
        tail = text[max(before, start - _LONGEST - _NOTES) : start]
        if first[:1].islower():
            tail = _above_notes(tail)
        line = " ".join(_beginning(tail[-_LONGEST:]).split())
        if line and _goes_on(line, first):
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


def _above_notes(tail: str) -> str:
    """The end of a page without the footnotes at its foot, if the text above them ends within a sentence."""
    found = list(_NOTE.finditer(tail, max(0, len(tail) - _NOTES)))
    for at, note in enumerate(found):
        body, mark = tail[: note.start()], note.group(1)
        marks = [each.group(1) for each in found[at:]]
        told = _CLOSED.search(tail.rstrip()[-8:]) or mark.translate(_RAISED) in body or f"[{mark}]" in body
        sure = not mark.isascii() or (told and all(each.group(2).isupper() for each in found[at:]))
        if sure and _counts_up(marks):
            return body if _beginning(body[-_LONGEST:]) else tail
    return tail


def _counts_up(marks: list[str]) -> bool:
    """Return whether marks are those of footnotes that follow each other, not of a list."""
    if all(mark.isdigit() for mark in marks):
        numbers = [int(unicodedata.normalize("NFKC", mark)) for mark in marks]
        return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return len(set(marks)) == len(marks)


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
