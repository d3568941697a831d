"""Containers of which a part is damaged or missing: what stands there is read, and the report says so."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import xlsxwriter

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers import Parsed, Raw, parse
from tests.unit.ingest.ingest_samples import make_docx, make_epub, make_pptx
from tests.unit.ingest.parsers.table_texts import table_in

Change = Callable[[bytes], bytes | None]


def _changed(data: bytes, part: str, change: Change) -> bytes:
    """The file with a part changed, or without it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        assert part in old.namelist()
        for entry in old.infolist():
            content: bytes | None = old.read(entry)
            content = change(content or b"") if entry.filename == part else content
            if content is not None:
                new.writestr(entry.filename, content)
    return out.getvalue()


def _read(data: bytes, ext: str) -> Parsed:
    return parse(Raw(data, f"a{ext}", ext))


def _words(document: Any) -> None:
    for text in ("The gate opens at seven.", "It closes at nine.", "It is locked at ten."):
        document.add_paragraph(text)


DAMAGE: dict[str, Change] = {
    "a tag that closes another": lambda part: part.replace(b"nine.</w:t>", b"nine.</w:q>"),
    "a bare ampersand": lambda part: part.replace(b"at ten", b"& at ten"),
    "bytes that are no UTF-8": lambda part: part.replace(b"at ten", b"\xff\xfeat ten"),
    "a control character": lambda part: part.replace(b"at ten", b"&#x1;\x02at ten"),
    "cut off": lambda part: part[: part.index(b"ten.")],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_word_document_whose_main_part_is_damaged(name: str) -> None:
    found = _read(_changed(make_docx(_words), "word/document.xml", DAMAGE[name]), ".docx")
    assert found.text.startswith("The gate opens at seven.\n\nIt closes at nine.")
    assert found.note == "damaged, and read as far as it goes: word/document.xml"


@pytest.mark.parametrize("change", [lambda part: b"", lambda part: b"no XML", lambda part: None])
def test_a_word_document_without_a_readable_main_part_is_refused(change: Change) -> None:
    with pytest.raises(UnsupportedDocument, match=r"corrupt|zip"):
        _read(_changed(make_docx(_words), "word/document.xml", change), ".docx")


def _half(part: bytes) -> bytes:
    return part[: len(part) * 2 // 3]


def _book() -> bytes:
    out = io.BytesIO()
    with xlsxwriter.Workbook(out) as book:
        for name, rows in (
            ("A", [["ship", "crew", "port"], ["Argo", 12, "Oban"]]),
            ("B", [["ship", "crew"]]),
        ):
            sheet = book.add_worksheet(name)
            for at, row in enumerate(rows):
                sheet.write_row(at, 0, row)
    return out.getvalue()


@pytest.mark.parametrize(
    ("part", "change", "note"),
    [
        ("xl/worksheets/sheet2.xml", _half, "damaged, and read as far as it goes: xl/worksheets/sheet2.xml"),
        ("xl/worksheets/sheet2.xml", lambda part: None, "left out: 1 sheets that are missing"),
        ("xl/sharedStrings.xml", lambda part: None, "left out: 7 texts that are missing"),
        ("xl/styles.xml", lambda part: part[:10], "styles are broken: numbers are read as stored"),
    ],
)
def test_a_workbook_that_is_damaged(part: str, change: Change, note: str) -> None:
    found = _read(_changed(_book(), part, change), ".xlsx")
    assert note in found.note
    assert "12" in found.text
    assert "texts" in note or table_in(found.text)[1] == ["Argo", "12", "Oban"]


def _slides(deck: Any) -> None:
    for title in ("Gates", "Ports"):
        deck.slides.add_slide(deck.slide_layouts[5]).shapes.title.text = title


@pytest.mark.parametrize("change", [lambda part: None, lambda part: b"no XML"])
def test_slides_that_are_missing(change: Change) -> None:
    found = _read(_changed(make_pptx(_slides), "ppt/slides/slide1.xml", change), ".pptx")
    assert (found.text, found.pages) == ("# Ports", ((0, 2),))
    assert "left out: 1 slides that are missing or unreadable" in found.note


def test_a_slide_that_is_cut_off() -> None:
    def cut(part: bytes) -> bytes:
        return part[: re.search(rb"Gates</a:t>", part).end()]  # type: ignore[union-attr]

    found = _read(_changed(make_pptx(_slides), "ppt/slides/slide1.xml", cut), ".pptx")
    assert found.text == "# Gates\n\n# Ports"
    assert found.note == "damaged, and read as far as it goes: ppt/slides/slide1.xml"


def test_chapters_that_are_missing_keep_their_numbers() -> None:
    book = make_epub({"a.xhtml": "<p>First words.</p>", "b.xhtml": "<p>Last words.</p>"})
    found = _read(_changed(book, "OEBPS/a.xhtml", lambda part: None), ".epub")
    assert (found.text, found.pages) == ("Last words.", ((0, 2),))
    assert found.note == "left out: 1 chapters that are missing"
