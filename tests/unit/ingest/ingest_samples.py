"""Documents of every kind, good and bad."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import docx
from fpdf import FPDF

from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, Unchanged

ParseFile = Callable[..., ParsedFile | Unchanged | Failed]


def text_of(result: ParsedFile | Unchanged | Failed) -> str:
    """The document's text, put together from its chunks."""
    assert isinstance(result, ParsedFile), result
    return "".join(chunk.text for chunk in result.chunks)


def make_pdf(pages: list[str], *, password: str | None = None, title: str | None = None) -> bytes:
    pdf = FPDF()
    pdf.set_font("Helvetica", size=12)
    if title:
        pdf.set_title(title)
    for page in pages:
        pdf.add_page()
        if page:
            pdf.multi_cell(0, 6, page)
    if password:
        pdf.set_encryption(owner_password=password, user_password=password)
    return bytes(pdf.output())


def make_docx(build: Callable[[Any], object]) -> bytes:
    document = docx.Document()
    build(document)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()
