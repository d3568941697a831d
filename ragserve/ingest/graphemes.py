"""Characters as readers see them: a letter with what stands above, below and joined to it is one."""

from __future__ import annotations

from functools import cache
from typing import Any

_LONGEST = 128  # characters looked back at; no grapheme of a language is longer


@cache
def _graphemes() -> Any:
    import regex  # Python's own re knows no graphemes

    return regex.compile(r"\X")


def grapheme_start(text: str, at: int) -> int:
    """``at``, moved back to where the grapheme around it begins (UAX 29). One of more than 128 characters is
    cut."""
    if not 0 < at < len(text) or (text[at - 1].isascii() and text[at].isascii() and text[at] != "\n"):
        return at
    start = max(0, at - _LONGEST)
    for found in _graphemes().finditer(text, start, min(len(text), at + 1)):
        if found.end() > at:
            return found.start() if found.start() > start or start == 0 else at
    return at
