"""Images and scanned PDFs by docling: recognised text and layout as Markdown, page by page."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import Any

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.base import Parsed, Raw, join_pages, tidy, unreadable, without_controls
from ragserve.ingest.parsers.sniff import image_ext


def parse(raw: Raw) -> Parsed:
    converter = _converter()
    from docling.datamodel.base_models import ConversionStatus, DocumentStream

    image = image_ext(raw.data)
    stream = DocumentStream(name=f"document{image or '.pdf'}", stream=BytesIO(raw.data))
    result = converter.convert(stream, raises_on_error=False)
    problems = "; ".join(error.error_message for error in result.errors)
    if result.status not in (ConversionStatus.SUCCESS, ConversionStatus.PARTIAL_SUCCESS):
        raise unreadable("corrupt", f"docling cannot read it ({problems or result.status.value})")
    document = result.document
    pages = [_page(document, number) for number in range(1, max(document.pages, default=0) + 1)]
    text, starts = join_pages(pages)
    if not text:
        raise unreadable("empty", f"docling recognises no text on {len(pages)} page(s)")
    note = "text recognised by docling" + (f"; not all of it: {problems}" if problems else "")
    mime = f"image/{image[1:].replace('jpg', 'jpeg')}" if image else "application/pdf"
    return Parsed(text, mime, "", starts, {"pages": len(pages)}, note)


def _page(document: Any, number: int) -> str:
    if number not in document.pages:
        return ""
    text = document.export_to_markdown(
        page_no=number, image_placeholder="", escape_html=False, escape_underscores=False
    )
    return tidy(without_controls(text))


@cache
def _converter() -> Any:
    """The converter, which keeps its models. Raises ``UnsupportedDocument`` without docling."""
    try:
        from docling.datamodel.base_models import InputFormat
        from docling.document_converter import DocumentConverter
    except ImportError as error:
        raise UnsupportedDocument(
            f"an image or a scan, and docling, which reads it, is not installed ({error})",
            hint="pip install 'ragserve[docling]'",
        ) from error
    return DocumentConverter(allowed_formats=[InputFormat.PDF, InputFormat.IMAGE])
