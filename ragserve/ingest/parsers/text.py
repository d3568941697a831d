"""Plain text, unchanged."""

from __future__ import annotations

from ragserve.ingest.parsers.base import Parsed, Raw
from ragserve.ingest.parsers.charset import decode


def parse(raw: Raw) -> Parsed:
    text, note = decode(raw.data, raw.charset)
    return Parsed(text, "text/plain", note=note)
