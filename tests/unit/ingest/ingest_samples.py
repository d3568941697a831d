"""Documents of every kind, good and bad."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
from fpdf import FPDF

from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, Unchanged

ParseFile = Callable[..., ParsedFile | Unchanged | Failed]


def assert_fails(parse: ParseFile, path: Path, data: bytes, code: str, word: str) -> None:
    """A file with this content fails with the code, and a reason that contains the word."""
    path.write_bytes(data)
    result = parse(path)
    assert isinstance(result, Failed), result
    assert result.code == code, result
    assert word in result.reason, result


def text_of(result: ParsedFile | Unchanged | Failed) -> str:
    """The document's text, put together from its chunks."""
    assert isinstance(result, ParsedFile), result
    return "".join(chunk.text[chunk.header_chars :] for chunk in result.chunks)


def places_of(result: ParsedFile | Unchanged | Failed) -> list[tuple[int | None, str]]:
    """The page and the text of each chunk."""
    assert isinstance(result, ParsedFile), result
    return [(chunk.page, chunk.text.strip()) for chunk in result.chunks]


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


def make_xlsx(sheets: dict[str, list[list[Any]]], *, title: str | None = None) -> bytes:
    """A workbook with rows of cells for each sheet."""
    book = openpyxl.Workbook()
    book.remove(book.active)
    book.properties.title = title
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


def make_pptx(build: Callable[[Any], object]) -> bytes:
    deck = pptx.Presentation()
    build(deck)
    out = io.BytesIO()
    deck.save(out)
    return out.getvalue()


def make_zip(members: dict[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def make_epub(chapters: dict[str, str], *, title: str = "", extra: dict[str, str] | None = None) -> bytes:
    """A book whose spine is in the order of ``chapters``: file name and XHTML body."""
    items = "".join(
        f'<item id="i{n}" href="{name}" media-type="application/xhtml+xml"/>'
        for n, name in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="i{n}"/>' for n in range(len(chapters)))
    package = (
        '<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0">'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></metadata>'
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    container = (
        '<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles>'
        "</container>"
    )
    head = '<?xml version="1.0" encoding="utf-8"?>'
    pages = {
        f"OEBPS/{name.replace('%20', ' ')}": f"{head}<html><body>{body}</body></html>"
        for name, body in sorted(chapters.items())  # another order than the spine's
    }
    return make_zip(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": container,
            "OEBPS/book.opf": package,
            **pages,
            **(extra or {}),
        }
    )
