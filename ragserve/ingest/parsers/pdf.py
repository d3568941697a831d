"""PDF by PDFium, page by page. PDFium is not thread-safe; the worker has a single thread."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

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
from ragserve.ingest.parsers.pdf_annotations import annotation_lines, attached_files
from ragserve.ingest.parsers.pdf_furniture import without_furniture
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
            if document.get_formtype() != pypdfium2.raw.FORMTYPE_NONE:
                document.init_forms()  # before pages are loaded
            dropped: Counter[str] = Counter()
            read = [_page(document, number, raw, dropped) for number in range(len(document))]
            files = attached_files(document)
            title = document.get_metadata_value("Title") or ""
        finally:
            document.close()
    if not read:
        raise unreadable("corrupt", "the PDF has no pages")
    pages = mended(without_furniture([text for text, _ in read]))
    below = ["\n".join(lines) for _, lines in read]
    if files:
        below[-1] += f"\nAttachments: {', '.join(files)}"
    shown = [
        "\n".join(filter(None, (page.strip(), lines.strip())))
        for page, lines in zip(pages, below, strict=True)
    ]
    text, starts = join_pages([tidy(without_controls(page)) for page in shown])
    if not text and dropped:
        raise unreadable("empty", f"no text that a reader sees ({left_out(dropped)})")
    if not any(map(str.strip, pages)) and not any(_holds_more_than_comments(lines) for _, lines in read):
        raise ScannedPdf(f"empty: no text on {len(pages)} page(s), probably scanned images ({OCR_HINT})")
    return Parsed(text, "application/pdf", _title(title), starts, {"pages": len(pages)}, left_out(dropped))


def _page(document: Any, number: int, raw: Raw, dropped: Counter[str]) -> tuple[str, list[str]]:
    """A page's text, and the lines of its annotations; counts in ``dropped`` what is not taken."""
    import pypdfium2

    try:
        page = document[number]
        lines = annotation_lines(document, page, dropped, hidden=raw.hidden, comments=raw.comments)
        text, n_hidden = page_text(page, hidden=raw.hidden)
    except pypdfium2.PdfiumError as error:
        raise unreadable("corrupt", f"page {number + 1} of the PDF cannot be read ({error})") from error
    if n_hidden and not raw.hidden:
        dropped["hidden passages"] += n_hidden
    return text.replace("\r\n", "\n").replace("\r", "\n"), lines


def _holds_more_than_comments(lines: list[str]) -> bool:
    """Return whether lines of annotations are a document's own text; a scan may have comments too."""
    return any(not line.startswith("[Comment") for line in lines)


def _title(given: str) -> str:
    """The title that a file gives, unless a program made it up."""
    title = _PROGRAM.sub("", one_line(given))
    return "" if _NO_TITLE.match(title) else title
