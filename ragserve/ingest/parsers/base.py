"""Input and output of parsers. They run in the worker process: no torch, no SGLang, no network."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from ragserve.errors import UnsupportedDocument

PARSER_VERSION = 2
"""Part of every content hash. Raise it when a parser gives other text for the same bytes."""

NOT_TEXT = "not_text"
"""Code of the error for files that a directory may hold beside documents: images, programs, archives."""

_LONG_GAP = re.compile(r"\s{65,}")


@dataclass(frozen=True, slots=True)
class Raw:
    """A file's bytes and origin. ``charset`` is from the HTTP header; ``ext`` is lower case, with its dot."""

    data: bytes
    filename: str
    ext: str
    url: str | None = None
    charset: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document as text.

    ``pages`` holds (offset in ``text``, page number from 1) in order and is empty for formats without pages.
    Chunks are cut within a page, so the page of a citation is exact. ``title`` is empty if the document has
    none. ``note`` says what the reader of a job's report should know, such as a guessed charset.
    """

    text: str
    mime: str
    title: str = ""
    pages: tuple[tuple[int, int], ...] = ()
    metadata: dict[str, str | int] = field(default_factory=dict)
    note: str = ""


def unreadable(
    kind: Literal["empty", "corrupt", "encrypted", "undecodable"], why: str
) -> UnsupportedDocument:
    """The error for a file of a known format that has no readable text; ``kind`` gives its code."""
    code = kind if kind == "undecodable" else f"{kind}_document"
    return UnsupportedDocument(f"{kind}: {why}", code=code)


def not_text(what: str) -> UnsupportedDocument:
    """The error for a file of a kind that is never text; ``what`` names it."""
    return UnsupportedDocument(f"binary: {what}, not a document", code=NOT_TEXT)


def tidy(text: str) -> str:
    """Shorten runs of more than 64 white space characters, which would fill chunks of their own."""
    return _LONG_GAP.sub(lambda gap: "\n\n" if "\n" in gap.group() or "\r" in gap.group() else " ", text)


def join_pages(pages: list[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Join pages with blank lines. Returns the text and (offset, page number) of each page that has text."""
    parts: list[str] = []
    starts: list[tuple[int, int]] = []
    offset = 0
    for number, page in enumerate(pages, 1):
        page = page.strip()
        if not page:
            continue
        if parts:
            parts[-1] += "\n\n"
            offset += 2
        starts.append((offset, number))
        parts.append(page)
        offset += len(page)
    return "".join(parts), tuple(starts)
