"""Where sentences end, in all scripts: for answers, embedded sentences, pages that go on, and analyses."""

from __future__ import annotations

import re
from collections.abc import Iterator

SPACED = ".!?\uff0e"
"""What ends a sentence before white space. A full-width stop stands in numbers, too."""
ALONE = (
    "\u3002\uff01\uff1f\uff61\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57\u203c\u2047\u2048\u2049"  # wide, doubled
    "\u0964\u0965\u06d4\u061f\u061e\u0589\u1362\u1367\u1368"  # Indic, Arabic, Armenian, Ethiopic
    "\u17d4\u17d5\u104b\u0e5a\u0e5b\u0700\u0701\u0702\u07f9\u1803\u1809\ua9c8\ua9c9\uabeb"  # Khmer and more
)
"""What ends a sentence wherever it stands: sentence terminals of Unicode that no number and no name has."""
CLOSING = "\"'\u201d\u2019\u00bb)\\]\u300d\u300f\uff09\u3011\u3009\u300b\u3015\uff3d\uff5d\uff02\uff07"
"""Quotes and brackets that belong to the sentence before them, for a character class."""
_THAI = "\u0e00-\u0e5b\u0e80-\u0edf"  # and Lao: a blank is all that ends their sentences
_PHRASE = 40  # characters from which on a blank ends one: a shorter phrase goes on
_END = re.compile(
    rf"[{SPACED}][{CLOSING}]*+(?=\s)|[{ALONE}]++[{CLOSING}]*+|\n|(?<=[{_THAI}]) ++(?=[{_THAI}])"
)


def sentence_ends(text: str, start: int = 0, stop: int | None = None) -> Iterator[int]:
    """Yield the offset behind each sentence's end, and behind each line break, in ``text[start:stop]``. White
    space behind a sentence belongs to none, except for the blanks that end one of Thai or Lao. The end of the
    text is not among them."""
    last = start
    for found in _END.finditer(text, start, len(text) if stop is None else stop):
        if found.group()[0] == " " and found.start() - last < _PHRASE:
            continue
        last = found.end()
        yield last


def ends_sentence(text: str) -> bool:
    """Whether the text, such as a token's, ends with a sentence's end, closing quotes and brackets aside."""
    return bool(_LAST.search(text))


_LAST = re.compile(rf"[{SPACED[:-1]}{ALONE}][{CLOSING} \t]*+\Z")
