"""Parsers, one module per format, chosen by content first and by extension second.

To add one, write ``parse(raw: Raw) -> Parsed`` in a module here, name it in ``PARSERS``, and teach
`sniff.detect` to recognise the format. Modules are imported on first use, in the worker process, so that a
command that parses no PDF never loads PDFium.
"""

from __future__ import annotations

from importlib import import_module

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.base import PARSER_VERSION, Parsed, Raw, tidy
from ragserve.ingest.parsers.sniff import detect

__all__ = ["PARSERS", "PARSER_VERSION", "Parsed", "Raw", "parse"]

PARSERS = {
    "pdf": "ragserve.ingest.parsers.pdf",
    "docx": "ragserve.ingest.parsers.docx",
    "html": "ragserve.ingest.parsers.html",
    "markdown": "ragserve.ingest.parsers.markdown",
    "code": "ragserve.ingest.parsers.code",
    "text": "ragserve.ingest.parsers.text",
}


def parse(raw: Raw, parser: str | None = None) -> Parsed:
    """Parse a document, with the named ``parser`` or the detected one. Raises ``UnsupportedDocument``."""
    if not raw.data:
        raise UnsupportedDocument("empty: the file has 0 bytes", code="empty_document")
    name = parser or detect(raw)
    parsed: Parsed = import_module(PARSERS[name]).parse(raw)
    # pages are tidied before they are joined: shortening gaps here would move their offsets
    if not parsed.pages:
        parsed = Parsed(tidy(parsed.text), parsed.mime, parsed.title, (), parsed.metadata)
    if not parsed.text.strip():
        raise UnsupportedDocument("empty: the file holds no text", code="empty_document")
    return parsed
