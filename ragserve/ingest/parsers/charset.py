"""Bytes to text: byte order mark, declared charset, UTF-8, then a guess that must look like text."""

from __future__ import annotations

import codecs

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.base import unreadable

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it starts with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_TEXT_CONTROLS = frozenset("\t\n\r\f\v\b\x1b\x85")
_MAX_CONTROLS = 0.01  # share of control characters above which decodable bytes are not text
_GUESS_BYTES = 256 * 1024  # used for the guess; all bytes are then decoded strictly


def decode(data: bytes, declared: str | None = None) -> str:
    """Decode text. The ``declared`` charset (HTTP header, HTML meta) is used if it decodes strictly.

    Raises ``UnsupportedDocument`` (code ``undecodable``) for binary data and for text in an unknown charset.
    """
    for mark, charset in _BOMS:
        if data.startswith(mark):
            try:
                return _checked(data.decode(charset), charset)
            except UnicodeDecodeError as error:
                why = f"starts with a {charset} mark but is not {charset} at byte {error.start}"
                raise _undecodable(why) from error
    if b"\x00" in data:
        raise _undecodable("binary: it holds zero bytes")
    for charset in dict.fromkeys((declared or "utf-8", "utf-8")):
        try:
            return _checked(data.decode(charset), charset)
        except (UnicodeDecodeError, LookupError):
            continue
    return _guessed(data)


def _guessed(data: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(data[:_GUESS_BYTES]).best()
    if best is None:
        raise _undecodable("neither UTF-8 nor text in another charset that could be recognised")
    try:
        return _checked(data.decode(best.encoding), best.encoding)
    except UnicodeDecodeError as error:
        raise _undecodable(f"starts as {best.encoding} but is not at byte {error.start}") from error


def _checked(text: str, charset: str) -> str:
    if "\x00" in text:
        raise _undecodable(f"binary: it decodes as {charset} to zero characters")
    controls = sum(1 for c in text[:65536] if (c < " " or "\x7f" <= c < "\xa0") and c not in _TEXT_CONTROLS)
    if controls > _MAX_CONTROLS * min(len(text), 65536):
        raise _undecodable("binary: too many control characters for text")
    return text


def _undecodable(why: str) -> UnsupportedDocument:
    return unreadable("undecodable", f"{why} (convert it to UTF-8)")
