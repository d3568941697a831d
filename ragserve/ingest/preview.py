"""How a file would be cut: parsed and chunked as ingestion does it, and nothing is stored."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from ragserve.config import Settings
from ragserve.errors import TooManyRequests, UnsupportedDocument
from ragserve.ingest.parsing.parse_process import (
    Failed,
    ParsedFile,
    ParseProcess,
    ParseRequest,
    Unchanged,
    parsing_options,
)
from ragserve.ingest.pipeline import shown_title
from ragserve.ingest.tokenizer import TokenizerSource
from ragserve_index.types import Chunk

MOST_AT_ONCE = 2
"""Previews of a server at a time: each is a process of its own."""


class Previewer:
    """Thread-safe. ``tokenizer`` loads the serving model's."""

    def __init__(self, settings: Settings, tokenizer: Callable[[], TokenizerSource]) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)

    def preview(self, path: Path, filename: str, *, chunk_tokens: int | None = None) -> ParsedFile:
        """Parse and cut a file; ``filename`` hints at its format. ``chunk_tokens``: in place of the setting.

        Raises ``UnsupportedDocument`` with the reason for a file that ingestion would refuse, and
        ``TooManyRequests`` beside `MOST_AT_ONCE` others."""
        if not self._free.acquire(blocking=False):
            raise TooManyRequests(
                f"{MOST_AT_ONCE} previews are being made already.",
                hint="Ask again when they are done.",
                code="previews_busy",
            )
        try:
            options = parsing_options(self._settings, self._tokenizer())
            if chunk_tokens is not None:
                options["chunk_tokens"] = chunk_tokens
            ext = os.path.splitext(filename)[1].lower()
            with ParseProcess(**options) as parser:
                result = parser.parse(ParseRequest(str(path), filename, ext, salt="", attachments=False))
        finally:
            self._free.release()
        if isinstance(result, Failed | Unchanged):  # never unchanged: no hash is known
            reason = result.reason if isinstance(result, Failed) else "unchanged"
            raise UnsupportedDocument(reason, code=getattr(result, "code", None))
        return result


def previewed(parsed: ParsedFile, source: str) -> list[Chunk]:
    """The chunks as they would be indexed, of chunk_id 0, with what the file itself says as metadata."""
    title = shown_title(parsed, source)
    return [
        Chunk(
            chunk_id=0,
            doc_id="",
            ordinal=ordinal,
            text=chunk.text,
            start=chunk.start,
            end=chunk.end,
            page=chunk.page,
            n_tokens=chunk.n_tokens,
            source=source,
            title=title,
            metadata=parsed.metadata,
        )
        for ordinal, chunk in enumerate(parsed.chunks)
    ]
