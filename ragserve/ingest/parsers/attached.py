"""The files that messages carry: which become documents of their own, under which names, and which do not."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass, field

from ragserve.ingest.parsers.base import Attachment, left_out, one_line

MOST = 500
"""Attachments that are taken of one file."""

_NAME_CHARS = 120
_CALENDARS = ("text/calendar", "application/ics")
_SIGNATURES = frozenset(
    f"application/{kind}"
    for kind in ("pgp-signature", "pgp-keys", "pkcs7-signature", "x-pkcs7-signature", "pgp-encrypted")
)
_SIGNATURE_EXT = (".p7s", ".asc", ".sig")
_UNSAFE = frozenset("/\\:\0")


@dataclass
class Attachments:
    """Collects the attachments of one file, under names of their own, and counts what is left out."""

    found: list[Attachment] = field(default_factory=list)
    _left_out: Counter[str] = field(default_factory=Counter)
    _names: set[str] = field(default_factory=set)

    def add(
        self, name: str, kind: str, data: bytes | None, *, inline: bool, charset: str | None, where: str = ""
    ) -> None:
        """Take a file of the media type ``kind``, or count why not. ``where`` goes before its name."""
        name = clean(name) or "attachment"
        if kind in _CALENDARS or name.lower().endswith(".ics"):
            self._left_out["calendar entries"] += 1
        elif kind in _SIGNATURES or name.lower().endswith(_SIGNATURE_EXT):
            self._left_out["signatures"] += 1
        elif inline and kind.startswith("image/"):
            self._left_out["inline images"] += 1
        elif not data:
            self._left_out["empty attachments"] += 1
        elif len(self.found) >= MOST:
            self._left_out[f"attachments beyond the first {MOST}"] += 1
        else:
            self.found.append(Attachment(self._own(where + name), data, charset))

    @property
    def note(self) -> str:
        """What the report should say about what was left out."""
        return left_out(self._left_out)

    def _own(self, name: str) -> str:
        stem, dot, ext = name.rpartition(".")
        own, number = name, 1
        while own.casefold() in self._names:
            number += 1
            own = f"{stem} ({number}){dot}{ext}" if dot else f"{name} ({number})"
        self._names.add(own.casefold())
        return own


def clean(name: str) -> str:
    """A file's name as one part of a document's name: no folder, no control characters, not too long."""
    name = one_line(unicodedata.normalize("NFC", name)).replace("\\", "/").rsplit("/", 1)[-1]
    name = "".join(c for c in name if c not in _UNSAFE and unicodedata.category(c) != "Cf").strip(". ")
    stem, dot, ext = name.rpartition(".")
    return f"{stem[: _NAME_CHARS - len(ext)]}{dot}{ext[:10]}" if dot else name[:_NAME_CHARS]
