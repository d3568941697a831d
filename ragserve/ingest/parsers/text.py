"""Plain text: the document as it is."""

from __future__ import annotations

from ragserve.ingest.parsers.base import Parsed, Raw
from ragserve.ingest.parsers.charset import decode

__all__ = ["parse"]


def parse(raw: Raw) -> Parsed:
    return Parsed(decode(raw.data, raw.charset), "text/plain")
