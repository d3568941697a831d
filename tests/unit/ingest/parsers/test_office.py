"""Workbooks, slides and books: their pages, tables and names, through the parsing process."""

from __future__ import annotations

import datetime
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
from docx.oxml import parse_xml
from pptx.util import Inches

from ragserve.ingest.parsers import Raw
from ragserve.ingest.parsers import parse as parse_raw
from ragserve.ingest.parsing.parse_process import ParsedFile
from tests.unit.ingest.ingest_samples import (
    ParseFile,
    assert_fails,
    make_docx,
    make_epub,
    make_pptx,
    make_xlsx,
    make_zip,
    places_of,
    text_of,
)


def test_a_sheet_is_a_page_with_a_table(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "ports.xlsx"
    sheets: dict[str, list[list[Any]]] = {
        "Ports": [["port", "depth", "opened", "open"], ["Oslo|fjord", 12.5, datetime.date(1899, 5, 4), True]],
        "Empty": [],
        "Notes": [["Only a remark."]],
    }
    path.write_bytes(make_xlsx(sheets, title="Harbours"))
    result = parse(path)
    assert places_of(result) == [
        (
            1,
            "# Ports\n\n| port | depth | opened | open |\n|---|---|---|---|\n"
            "| Oslo\\|fjord | 12.5 | 1899-05-04 | TRUE |",
        ),
        (3, "# Notes\n\nOnly a remark."),
    ]
    assert isinstance(result, ParsedFile)
    assert result.title == "Harbours"
    assert result.metadata == {"pages": 3, "page_kind": "sheet", "page_names": ["Ports", "Empty", "Notes"]}


def test_blank_rows_separate_tables_but_not_the_rows_of_one(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "a.xlsx"
    rows = [["Year", "Sum"], [2020, 1], [], [2021, 2], [], ["Name", "Town"], ["Ada", "Bath"]]
    titles = [["A remark", "of two cells"], [], ["", "Report"], ["2022"]]
    path.write_bytes(make_xlsx({"S": [*titles, *rows]}))
    assert text_of(parse(path)).strip() == (
        "# S\n\nA remark | of two cells\n\nReport\n\n2022\n\n"
        "| Year | Sum |\n|---|---|\n| 2020 | 1 |\n| 2021 | 2 |\n\n"
        "| Name | Town |\n|---|---|\n| Ada | Bath |"
    )


def test_a_long_sheet_keeps_its_header(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "long.xlsx"
    rows = [[f"Harbour {n}", n * 31, "gravel and sand"] for n in range(100)]
    path.write_bytes(make_xlsx({"S": [["harbour", "ships", "ground"], *rows]}))
    result = parse(path)
    assert isinstance(result, ParsedFile)
    assert len(result.chunks) > 3
    assert all("| harbour | ships | ground |\n|---|---|---|\n" in chunk.text for chunk in result.chunks)


def test_a_cell_at_the_edge_of_a_sheet_costs_nothing(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "edge.xlsx"
    book = make_xlsx({"S": [["a", "b"], [1, 2]]})
    path.write_bytes(book)
    import openpyxl

    sheet = openpyxl.load_workbook(path)
    sheet["S"]["XFD200000"] = "far away"
    sheet.save(path)
    assert "far away" in text_of(parse(path))


def slides(deck: Any) -> None:
    first = deck.slides.add_slide(deck.slide_layouts[0])
    first.shapes.title.text = "Sea mammals"
    first.placeholders[1].text = "Whales\vand dolphins"
    first.notes_slide.notes_text_frame.text = "Speak slowly."
    deck.slides.add_slide(deck.slide_layouts[6])
    third = deck.slides.add_slide(deck.slide_layouts[6])
    table = third.shapes.add_table(2, 2, 0, 0, Inches(4), Inches(1)).table
    for at, text in enumerate(("animal", "tons", "blue whale", "150")):
        table.cell(at // 2, at % 2).text = text
    group = third.shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, Inches(1), Inches(1)).text_frame.text = "Inside a group"


def test_a_slide_is_a_page(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "whales.pptx"
    path.write_bytes(make_pptx(slides))
    result = parse(path)
    assert places_of(result) == [
        (1, "# Sea mammals\n\nWhales\nand dolphins\n\nNotes: Speak slowly."),
        (3, "| animal | tons |\n|---|---|\n| blue whale | 150 |\n\nInside a group"),
    ]
    assert isinstance(result, ParsedFile)
    assert result.metadata["page_kind"] == "slide"


CHAPTERS = {
    "z%20first.xhtml": "<h1>The <i>Start</i></h1><p>Call me Ishmael.</p>",
    "cover.svg.xhtml": "",
    "a-second.xhtml": "<h2>The End</h2><table><tr><td>ship</td><td>tons</td></tr>"
    "<tr><td>Pequod</td><td>400</td></tr></table>",
}


def test_chapters_of_a_book_are_pages_in_the_order_of_its_spine(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "moby.epub"
    path.write_bytes(make_epub(CHAPTERS, title="Moby Dick"))
    result = parse(path)
    assert places_of(result) == [
        (1, "The Start\nCall me Ishmael."),
        (3, "The End\n| ship | tons |\n|---|---|\n| Pequod | 400 |"),
    ]
    assert isinstance(result, ParsedFile)
    assert result.title == "Moby Dick"
    assert result.metadata["page_names"] == ["The Start", "", "The End"]


def test_shapes_beside_their_slide_are_left_out_and_counted() -> None:
    def build(deck: Any) -> None:
        shapes = deck.slides.add_slide(deck.slide_layouts[6]).shapes
        for left, text in ((1, "Seen."), (-9, "wombat"), (20, "wombat")):
            shapes.add_textbox(Inches(left), 0, Inches(2), Inches(1)).text_frame.text = text

    data = make_pptx(build)
    found = parse_raw(Raw(data, "a.pptx", ".pptx"))
    assert (found.text, found.note) == ("Seen.", "left out: 2 shapes beside their slide")
    assert found.text != parse_raw(Raw(data, "a.pptx", ".pptx", hidden=True)).text


def test_drawn_words_and_mixed_fractions_of_word_are_read() -> None:
    math = "http://schemas.openxmlformats.org/officeDocument/2006/math"
    fraction = "<m:f><m:num><m:r><m:t>1</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f>"
    formula = f'<m:oMath xmlns:m="{math}"><m:r><m:t>2</m:t></m:r>{fraction}</m:oMath>'
    drawn = '<v:shape xmlns:v="urn:schemas-microsoft-com:vml"><v:textpath string="DRAFT"/></v:shape>'

    def build(document: Any) -> None:
        document.add_paragraph().add_run()._r.append(parse_xml(drawn))
        cups = document.add_paragraph("5")
        cups.add_run("1").font.superscript = True
        cups.add_run("/")
        cups.add_run("2").font.subscript = True
        document.add_paragraph()._p.append(parse_xml(formula))

    assert parse_raw(Raw(make_docx(build), "a.docx", ".docx")).text == "DRAFT\n\n5 1/2\n\n2 1/2"


def odt_text(paragraphs: str) -> str:
    """What is read of a text of these paragraphs; t: is the prefix of its names."""
    urn = "urn:oasis:names:tc:opendocument:xmlns"
    content = (
        f'<o:document-content xmlns:o="{urn}:office:1.0" xmlns:t="{urn}:text:1.0">'
        f"<o:body><o:text>{paragraphs}</o:text></o:body></o:document-content>"
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("content.xml", content)
    return parse_raw(Raw(packed.getvalue(), "a.odt", ".odt")).text


def test_a_blank_between_two_looks_of_a_text_parts_words() -> None:
    spans = "<t:p><t:span>loud</t:span> <t:span>and</t:span>\n  <t:span>clear</t:span></t:p>"
    assert odt_text(spans) == "loud and clear"


def test_a_footnote_without_a_citation_is_read() -> None:
    note = "<t:note>{}<t:note-body><t:p>Since 1987.</t:p></t:note-body></t:note>"
    for citation, expected in (
        ("<t:note-citation>1</t:note-citation>", "Kept[1].\n\n[1] Since 1987."),
        ("<t:note-citation/>", "Kept.\n\n[Note: Since 1987.]"),
        ("", "Kept.\n\n[Note: Since 1987.]"),
    ):
        assert odt_text(f"<t:p>Kept{note.format(citation)}.</t:p>") == expected


def protected(algorithm: str) -> dict[str, str]:
    method = f"<EncryptedData><EncryptionMethod Algorithm='{algorithm}'/></EncryptedData>"
    return {"META-INF/encryption.xml": f"<encryption xmlns='urn:x'>{method}</encryption>"}


def test_scrambled_fonts_do_not_make_a_book_unreadable(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "fonts.epub"
    path.write_bytes(make_epub(CHAPTERS, extra=protected("http://www.idpf.org/2008/embedding")))
    assert "Ishmael" in text_of(parse(path))


def bad_containers() -> dict[str, tuple[bytes, str, str]]:
    """name -> (content, code, a word of the reason)."""
    xlsx, book = make_xlsx({"S": [["a"]]}), make_epub(CHAPTERS)
    missing = make_zip({"META-INF/container.xml": "<container/>"})
    return {
        "empty.xlsx": (make_xlsx({"S": []}), "empty_document", "no text"),
        "empty.pptx": (make_pptx(lambda deck: None), "empty_document", "no text"),
        "truncated.xlsx": (xlsx[: len(xlsx) // 2], "corrupt_document", "corrupt"),
        "truncated.epub": (book[: len(book) // 2], "corrupt_document", "corrupt"),
        "hollow.xlsx": (make_zip({"xl/workbook.xml": "<x/>"}), "corrupt_document", "Excel"),
        "hollow.pptx": (make_zip({"ppt/presentation.xml": "<x/>"}), "corrupt_document", "PowerPoint"),
        "hollow.epub": (missing, "corrupt_document", "EPUB"),
        "protected.epub": (
            make_epub(CHAPTERS, extra=protected("http://www.w3.org/2001/04/xmlenc#aes128-cbc")),
            "encrypted_document",
            "copy protection",
        ),
        "locked.xlsx": (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + "EncryptedPackage".encode("utf-16-le"),
            "encrypted_document",
            "password",
        ),
    }


@pytest.mark.parametrize("name", list(bad_containers()))
def test_a_bad_container_fails_with_its_reason(name: str, tmp_path: Path, parse: ParseFile) -> None:
    assert_fails(parse, tmp_path / name, *bad_containers()[name])


def test_the_name_of_the_file_does_not_matter(tmp_path: Path, parse: ParseFile) -> None:
    for name, data in (
        ("book.txt", make_epub(CHAPTERS)),
        ("deck.xlsx", make_pptx(slides)),
        ("table.csv", make_xlsx({"S": [["whales"]]})),
    ):
        (tmp_path / name).write_bytes(data)
        assert isinstance(parse(tmp_path / name), ParsedFile), name
