"""Text as the registry stores and compares it."""

from __future__ import annotations

import re
import unicodedata

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def storable(text: str) -> str:
    """The text with U+FFFD for what no database stores: NUL and lone surrogates. Its length stays."""
    return _UNSTORABLE.sub("\ufffd", text)


def normal(text: str) -> str:
    """The text in the form in which names and metadata are compared, NFC: an accent that is typed as a
    character of its own is that of the letter."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def forms(text: str) -> list[str]:
    """`normal` first, then the other forms in which an earlier version may have stored the text."""
    if text.isascii():
        return [text]
    return list(dict.fromkeys([normal(text), unicodedata.normalize("NFD", text), text]))
