"""PowerPoint files: a page per slide, with tables, grouped shapes and speaker notes."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, container_errors, one_line, paged

MIME = "application/vnd.openxmlformats-officedocument.presentationml.presentation"


def parse(raw: Raw) -> Parsed:
    import pptx
    from pptx.exc import PythonPptxError

    with container_errors("a PowerPoint file", PythonPptxError):
        deck = pptx.Presentation(BytesIO(raw.data))
        pages = [_slide(slide) for slide in deck.slides]
        title = deck.core_properties.title or ""
    return paged(pages, MIME, "slide", title=title or _first_heading(pages))


def _slide(slide: Any) -> str:
    title = slide.shapes.title
    heading = one_line(title.text_frame.text) if title is not None else ""
    parts = [f"# {heading}" if heading else ""]
    shapes = list(_shapes(slide.shapes))
    parts += [_text(shape) for shape in shapes if not heading or shape.element is not title.element]
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        notes = slide.notes_slide.notes_text_frame.text.strip()
        parts.append(f"Notes: {notes}" if notes else "")
    return "\n\n".join(filter(None, parts))


def _shapes(shapes: Any) -> Iterator[Any]:
    """Yield the shapes in their order, those of groups in place of the group."""
    stack = list(reversed(list(shapes)))
    while stack:
        shape = stack.pop()
        if hasattr(shape, "shapes"):
            stack.extend(reversed(list(shape.shapes)))
        else:
            yield shape


def _text(shape: Any) -> str:
    if getattr(shape, "has_table", False):
        return markdown_table([cell.text for cell in row.cells] for row in shape.table.rows)
    text = shape.text_frame.text if shape.has_text_frame else ""
    return text.replace("\v", "\n").strip()


def _first_heading(pages: list[str]) -> str:
    return next((page.split("\n", 1)[0][2:] for page in pages if page.startswith("# ")), "")
