"""A document that somebody else has cut, as `ragserve.ingest.chunk_lines` writes it."""

from __future__ import annotations

import json
from typing import Any

from ragserve.ingest.parsers.base import MAX_NAMES, NAME_CHARS, GivenCut, Parsed, Raw, joined_notes, one_line

_BETWEEN = "\n\n"


def parse(raw: Raw) -> Parsed:
    found = json.loads(raw.data)
    chunks: list[dict[str, Any]] = found["chunks"]
    metadata, pages, note = _pages(chunks)
    cuts: list[GivenCut] = []
    start = 0
    for chunk, page in zip(chunks, pages, strict=True):
        end = start + len(chunk["text"])
        cuts.append(GivenCut(start, end, page))
        start = end + len(_BETWEEN)
    return Parsed(
        _BETWEEN.join(chunk["text"] for chunk in chunks),
        "application/jsonl",
        metadata=metadata,
        note=joined_notes(found["note"], note),
        cuts=tuple(cuts),
    )


def _pages(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], list[int | None], str]:
    """Metadata about pages, each chunk's page, and a note. Sections of chunks without pages are counted as
    pages are; those of chunks with pages are the pages' names."""
    pages: list[int | None] = [chunk.get("page") for chunk in chunks]
    sections = [one_line(chunk.get("section") or "")[:NAME_CHARS] for chunk in chunks]
    if not any(sections):
        return {}, pages, ""
    metadata: dict[str, Any] = {}
    if not any(pages):
        metadata["page_kind"] = "section"
        places: dict[str, int] = {}
        pages = [places.setdefault(section, len(places) + 1) if section else None for section in sections]
    names: dict[int, list[str]] = {}
    for page, section in zip(pages, sections, strict=True):
        if page is not None and section and section not in names.setdefault(page, []):
            names[page].append(section)
    last = max(names, default=0)
    if last > MAX_NAMES:
        return metadata, pages, f"names of sections left out: {last:,} places, of {MAX_NAMES} names are kept"
    if names:
        metadata["page_names"] = ["; ".join(names.get(page, []))[:NAME_CHARS] for page in range(1, last + 1)]
    return metadata, pages, ""
