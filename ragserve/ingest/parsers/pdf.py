"""PDF by PDFium, page by page. PDFium is not thread-safe; the worker has a single thread."""

from __future__ import annotations

import re
import warnings

from ragserve.ingest.parsers.base import (
    OCR_HINT,
    Parsed,
    Raw,
    ScannedPdf,
    join_pages,
    left_out,
    one_line,
    tidy,
    unreadable,
    without_controls,
)
from ragserve.ingest.parsers.pdf_lines import mended
from ragserve.ingest.parsers.pdf_objects import page_text

# titles that programs give to files that have none, and what they write before a file's name
_NO_TITLE = re.compile(r"(?:untitled|unknown|document|microsoft (?:word|powerpoint|excel))\d*\Z", re.I)
_PROGRAM = re.compile(r"\AMicrosoft (?:Word|PowerPoint|Excel) - ", re.I)


def parse(raw: Raw) -> Parsed:
    import pypdfium2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about form layers, which hold no text of interest
        try:
            document = pypdfium2.PdfDocument(raw.data)
        except pypdfium2.PdfiumError as error:
            if error.err_code == 4:  # FPDF_ERR_PASSWORD
                raise unreadable("encrypted", "the PDF needs a password (remove it)") from error
            if error.err_code == 5:  # FPDF_ERR_SECURITY
                raise unreadable("encrypted", "a scheme that PDFium does not know") from error
            raise unreadable("corrupt", f"PDFium cannot read it ({error})") from error
        try:
            read = [_page(document, number, hidden=raw.hidden) for number in range(len(document))]
            title = document.get_metadata_value("Title") or ""
        finally:
            document.close()
    if not read:
        raise unreadable("corrupt", "the PDF has no pages")
    pages = mended([text for text, _ in read])
    text, starts = join_pages([tidy(without_controls(page)) for page in pages])
    note = left_out({"hidden passages": 0 if raw.hidden else sum(n for _, n in read)})
    if not text:
        raise ScannedPdf(f"empty: no text on {len(pages)} page(s), probably scanned images ({OCR_HINT})")
    return Parsed(text, "application/pdf", _title(title), starts, {"pages": len(pages)}, note)


def _page(document: object, number: int, *, hidden: bool) -> tuple[str, int]:
    import pypdfium2

    try:
        page = document[number]  # type: ignore[index]
        text, n_hidden = page_text(page, hidden=hidden)
    except pypdfium2.PdfiumError as error:
        raise unreadable("corrupt", f"page {number + 1} of the PDF cannot be read ({error})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n"), n_hidden


def _title(given: str) -> str:
    """The title that a file gives, unless a program made it up."""
    title = _PROGRAM.sub("", one_line(given))
    return "" if _NO_TITLE.match(title) else title
