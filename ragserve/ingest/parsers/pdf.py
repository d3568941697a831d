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
    one_line,
    tidy,
    unreadable,
    without_controls,
)

_HYPHENATED = re.compile("[\ufffe\x02\xad]\\s*\n?")  # PDFium's marks for a hyphen that breaks a line
_WRAPPED = re.compile(r"(?<=[a-z,;])\n(?=[a-z(])")  # a line that breaks in the middle of a sentence


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
            pages = [_page_text(document, number) for number in range(len(document))]
            title = document.get_metadata_value("Title") or ""
        finally:
            document.close()
    if not pages:
        raise unreadable("corrupt", "the PDF has no pages")
    text, starts = join_pages(pages)
    if not text:
        raise ScannedPdf(f"empty: no text on {len(pages)} page(s), probably scanned images ({OCR_HINT})")
    return Parsed(text, "application/pdf", one_line(title), starts, {"pages": len(pages)})


def _page_text(document: object, number: int) -> str:
    import pypdfium2

    try:
        page = document[number]  # type: ignore[index]
        text: str = page.get_textpage().get_text_bounded()
    except pypdfium2.PdfiumError as error:
        raise unreadable("corrupt", f"page {number + 1} of the PDF cannot be read ({error})") from error
    text = _HYPHENATED.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return tidy(_WRAPPED.sub(" ", without_controls(text)))
