"""Plain text, unchanged."""

from __future__ import annotations

from ragserve.ingest.parsers.base import Parsed, Raw
from ragserve.ingest.parsers.charset import decode


def parse(raw: Raw) -> Parsed:
    return Parsed(decode(raw.data, raw.charset), "text/plain")
