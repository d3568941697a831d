"""Source code and data in text form: the unchanged text, with the language as metadata."""

from __future__ import annotations

from ragserve.ingest.parsers.base import Parsed, Raw
from ragserve.ingest.parsers.charset import decode
from ragserve.ingest.parsers.sniff import language_of


def parse(raw: Raw) -> Parsed:
    language = language_of(raw) or "text"
    text, note = decode(raw.data)
    return Parsed(text, "text/x-source", raw.filename, metadata={"language": language}, note=note)
