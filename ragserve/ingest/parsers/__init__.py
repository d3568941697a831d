"""Parsers, one module per format, chosen by content first and by extension second.

To add one, write ``parse(raw: Raw) -> Parsed`` in a module here, name it in ``PARSERS``, and teach
`sniff.detect` to recognise the format. Modules are imported on first use, in the worker process, so that a
command that parses no PDF never loads PDFium.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from ragserve.ingest.markdown_tables import with_records
from ragserve.ingest.parsers.base import (
    PARSER_VERSION,
    Parsed,
    Raw,
    ScannedPdf,
    has_words,
    one_line,
    tidy,
    unreadable,
)
from ragserve.ingest.parsers.sniff import detect
from ragserve_index.text_forms import storable

__all__ = ["PARSERS", "PARSER_VERSION", "Parsed", "Raw", "parse"]

PARSERS = (
    *(
        "pdf",
        "docx",
        "xlsx",
        "pptx",
        "odf",
        "rtf",
        "doc",
        "msg",
        "epub",
        "html",
        "delimited",
        "records",
        "mail",
        "mbox",
    ),
    *("markdown", "code", "text", "ocr", "prechunked"),
)
"""Modules of this package."""

_WITH_TABLES = ("text/html", "text/markdown")  # types whose tables `markdown_table` did not write


def parse(raw: Raw, parser: str | None = None, *, ocr: bool = False) -> Parsed:
    """Parse a document, with the named ``parser`` or the detected one. With ``ocr``, text is recognised in
    images and scanned PDFs. What no database stores has become U+FFFD. Raises ``UnsupportedDocument``."""
    if not raw.data:
        raise unreadable("empty", "the file has 0 bytes")
    try:
        parsed = _parse(raw, parser or detect(raw, ocr=ocr))
    except ScannedPdf:
        if not ocr:
            raise
        parsed = _parse(raw, "ocr")
    # pages are tidied before they are joined: shortening gaps here would move their offsets
    if not parsed.pages and not parsed.cuts:
        text = with_records(parsed.text) if parsed.mime in _WITH_TABLES else parsed.text
        parsed = replace(parsed, text=tidy(text))
    if not parsed.text.strip():
        raise unreadable("empty", f"the file holds no text{f' ({parsed.note})' if parsed.note else ''}")
    if not has_words(parsed.text):
        raise unreadable("empty", "the file holds no letter and no digit")
    # in the text of its length, so that pages stay where they are
    return replace(parsed, text=storable(parsed.text), title=one_line(parsed.title))


def _parse(raw: Raw, parser: str) -> Parsed:
    parsed: Parsed = import_module(f"ragserve.ingest.parsers.{parser}").parse(raw)
    return parsed
