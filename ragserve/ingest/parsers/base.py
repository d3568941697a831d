"""Input and output of parsers. They run in the worker process: no torch, no SGLang, no network."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ragserve.errors import UnsupportedDocument

PARSER_VERSION = 5
"""Part of every content hash. Raise it when a parser gives other text for the same bytes."""

NOT_TEXT = "not_text"
"""Code of the error for files that a directory may hold beside documents: images, programs, archives."""

PageKind = Literal["page", "slide", "sheet", "chapter", "message", "section"]

_LONG_GAP = re.compile(r"\s{65,}")
_CONTROLS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
MAX_NAMES, NAME_CHARS = 200, 100  # of pages: every search reads them with the metadata of its documents


@dataclass(frozen=True, slots=True)
class Raw:
    """A file's bytes and origin. ``charset`` is from the HTTP header; ``ext`` is lower case, with its dot.

    ``hidden``: text that no reader sees is taken too. ``comments``: so are those that readers wrote.
    """

    data: bytes
    filename: str
    ext: str
    url: str | None = None
    charset: str | None = None
    hidden: bool = False
    comments: bool = True


class GivenCut(NamedTuple):
    """A chunk of a document that came in chunks: ``text[start:end]``."""

    start: int
    end: int
    page: int | None


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that a message carries. ``name`` identifies it within the message's file; its last part is the
    file's own name. ``charset`` is the part's."""

    name: str
    data: bytes = field(repr=False)
    charset: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document as text.

    ``pages`` holds (offset in ``text``, page number from 1) in order and is empty for formats without pages.
    Chunks are cut within a page, so the page of a citation is exact. In ``metadata``, ``page_kind`` says what
    the pages are, if they are not pages, and ``page_names`` what each is called. ``title`` is empty if there
    is none. ``note`` says what the reader of a job's report should know, such as a guessed charset.
    ``attachments`` become documents of their own.
    ``cuts``: the chunks, if the document came in chunks.
    """

    text: str
    mime: str
    title: str = ""
    pages: tuple[tuple[int, int], ...] = ()
    metadata: dict[str, str | int | list[str]] = field(default_factory=dict)
    note: str = ""
    attachments: tuple[Attachment, ...] = ()
    cuts: tuple[GivenCut, ...] = ()


OCR_HINT = "RAGSERVE_OCR=docling reads it, after pip install 'ragserve[docling]'"


class ScannedPdf(UnsupportedDocument, code="empty_document"):
    """A PDF of images: text has to be recognised in them."""


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


def paged(
    pages: Sequence[str],
    mime: str,
    kind: PageKind,
    *,
    names: Sequence[str] = (),
    title: str = "",
    note: str = "",
) -> Parsed:
    """A document of slides, sheets, chapters or messages; ``names`` are what the pages are called."""
    text, starts = join_pages([tidy(without_controls(page)) for page in pages])
    metadata: dict[str, str | int | list[str]] = {"pages": len(pages), "page_kind": kind}
    if any(names) and len(names) <= MAX_NAMES:
        metadata["page_names"] = [one_line(name)[:NAME_CHARS] for name in names]
    return Parsed(text, mime, one_line(title), starts, metadata, note)


def joined_notes(*notes: str) -> str:
    """One note of several for the job's report; empty ones are left out, and so is what was said before."""
    return "; ".join(dict.fromkeys(filter(None, notes)))


def left_out(kinds: Mapping[str, int]) -> str:
    """The note about what was not read: ``left out: 2 hidden rows, 1 hidden sheets``."""
    found = ", ".join(f"{n:,} {kind}" for kind, n in kinds.items() if n)
    return f"left out: {found}" if found else ""


def has_words(text: str) -> bool:
    """Return whether a text has a letter or a digit. One without cannot be asked for, but may be found."""
    return any(map(str.isalnum, text))


def without_controls(text: str) -> str:
    """Remove what cannot be stored or shown: control characters and lone surrogates."""
    return _CONTROLS.sub("", text)


def one_line(text: str) -> str:
    """The text of a title or a name: without control characters, on one line."""
    return " ".join(without_controls(text).split())


@contextmanager
def container_errors(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Say of the errors that a zip container of XML parts causes, and of ``errors``, that the file is
    encrypted or no readable ``what``."""
    from lxml import etree  # type: ignore[import-untyped]

    missing = (KeyError, ValueError, AttributeError, TypeError, IndexError, EOFError)  # parts, fields, bytes
    try:
        yield
    except RecursionError as error:
        raise unreadable("corrupt", f"not readable as {what} (nested too deeply)") from error
    # zipfile raises these for encryption and for compressions that it does not know
    except (NotImplementedError, RuntimeError) as error:
        raise unreadable("encrypted", str(error)) from error
    except (zipfile.BadZipFile, zlib.error, etree.XMLSyntaxError, ET.ParseError, *missing, *errors) as error:
        raise unreadable("corrupt", f"not readable as {what} ({error})") from error
