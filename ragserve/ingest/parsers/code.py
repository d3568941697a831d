"""Source code and data in text form: the unchanged text, with the language as metadata."""

from __future__ import annotations

from ragserve.ingest.parsers.base import Parsed, Raw
from ragserve.ingest.parsers.charset import decode
from ragserve.ingest.parsers.sniff import language_of


def parse(raw: Raw) -> Parsed:
    language = language_of(raw) or "text"
    return Parsed(decode(raw.data), "text/x-source", raw.filename, metadata={"language": language})
