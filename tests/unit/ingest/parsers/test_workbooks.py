"""Workbooks: cells as they are seen, what is hidden, and files that other libraries refuse."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from typing import Any

import openpyxl
import pytest
import xlsxwriter
from hypothesis import given
from hypothesis import strategies as st
from openpyxl.chart import BarChart, Reference
from openpyxl.comments import Comment
from openpyxl.styles import Font, PatternFill

from ragserve.ingest.parsers import Parsed, Raw, parse
from tests.unit.ingest.parsers.table_texts import table_in, written

CELLS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=8),
    st.integers(-(10**18), 10**18),
    st.decimals("-99999", "99999", places=3).map(float),
    st.booleans(),
)


def saved(build: Callable[[Any], object]) -> bytes:
    book = openpyxl.Workbook()
    build(book.active)
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


def read(data: bytes, *, hidden: bool = False, comments: bool = True) -> Parsed:
    return parse(Raw(data, "a.xlsx", ".xlsx", hidden=hidden, comments=comments))


def changed(data: bytes, change: Callable[[str, bytes], tuple[str, bytes]]) -> bytes:
    """The file with each part, or its name, changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            new.writestr(*change(entry.filename, old.read(entry)))
    return out.getvalue()


def shown(value: object) -> str:
    return (
        str(value).upper()
        if isinstance(value, bool)
        else f"{value:.15g}"
        if isinstance(value, float)
        else str(value)
    )


@given(st.lists(st.lists(CELLS, min_size=2, max_size=3), min_size=2, max_size=4))
def test_a_written_table_comes_back_cell_for_cell(rows: list[list[Any]]) -> None:
    rows = [row[:2] for row in rows if not any(str(cell).startswith("=") for cell in row)]
    rows = [row for row in rows if all(str(cell).strip() and "_x" not in str(cell) for cell in row)]
    if len(rows) > 1:
        text = read(saved(lambda sheet: [sheet.append(row) for row in rows])).text
        assert table_in(text) == written([[shown(cell) for cell in row] for row in rows])


def harbour(sheet: Any) -> None:
    for row in (["gate", "opens", "code"], ["north", "seven", "11"], ["south", "nine", "0000"]):
        sheet.append(row)


def test_hidden_rows_columns_and_sheets_are_counted_or_taken() -> None:
    def build(sheet: Any) -> None:
        harbour(sheet)
        sheet.row_dimensions[3].hidden = True
        sheet.column_dimensions["C"].hidden = True
        secret = sheet.parent.create_sheet("Secret")
        secret["A1"] = "marzipan"
        secret.sheet_state = "veryHidden"
        sheet["A4"], sheet["A4"].font = "unseen", Font(color="FFFFFFFF")
        sheet["B4"], sheet["B4"].font = "unseen", Font(color="FF00AA00")
        sheet["B4"].fill = PatternFill("solid", fgColor="FF00AA00")

    data = saved(build)
    found = read(data)
    assert table_in(found.text) == [["gate", "opens"], ["north", "seven"]]
    assert found.note == (
        "left out: 2 cells of hidden columns, 1 hidden rows, 2 cells in the colour of their ground, "
        "1 hidden sheets"
    )
    assert "Secret" not in str(found.metadata)
    everything = read(data, hidden=True)
    assert all(word in everything.text for word in ("0000", "marzipan", "south", "unseen"))
    assert not everything.note


def test_comments_chart_titles_and_formulas_without_a_value() -> None:
    def build(sheet: Any) -> None:
        harbour(sheet)
        sheet["A2"].comment = Comment("closed in winter", "Ann")
        sheet["D2"] = "=1+1"
        chart = BarChart()
        chart.title = "Sailings per week"
        chart.add_data(Reference(sheet, min_col=3, min_row=1, max_row=3), titles_from_data=True)
        sheet.add_chart(chart, "F1")

    found = read(saved(build))
    assert "[Comment on A2: closed in winter]" in found.text
    assert "Chart: Sailings per week" in found.text
    assert found.note.startswith("1 formulas without a stored value")
    without = read(saved(build), comments=False)
    assert "winter" not in without.text
    assert "1 comments" in without.note


def test_struck_out_text_is_marked() -> None:
    def build(sheet: Any) -> None:
        sheet.append(["item", "price"])
        sheet.append(["berth", 90])
        sheet["B2"].font = Font(strike=True)

    assert table_in(read(saved(build)).text)[1] == ["berth", "~~90~~"]


RICH = (
    '<is><r><t>10</t></r><r><rPr><vertAlign val="superscript"/></rPr><t>6</t></r><r><rPr><strike/></rPr>'
    "<t> old</t></r><rPh><t>read</t></rPh></is>"
)
BROKEN = {
    "fill": ("xl/styles.xml", r"<fills.*</fills>", "<fills><fill/></fills>"),
    "style name": ("xl/styles.xml", r'<cellStyle name="Normal"', "<cellStyle"),
    "border": ("xl/styles.xml", r"<left ?/>", '<left style="wavy"/>'),
    "colour": ("xl/styles.xml", r'<color theme="1" ?/>', '<color rgb="FFF"/>'),
    "font family": ("xl/styles.xml", r'family val="2"', 'family val="99"'),
    "created": ("docProps/core.xml", r"(<dcterms:created[^>]*>)[^<]*", r"\g<1>12 March 2024"),
    "properties": ("docProps/core.xml", r".*", "no XML"),
    "styles": ("xl/styles.xml", r".*", "no XML"),
    "validation": (
        "xl/worksheets/sheet1.xml",
        r"</sheetData>",
        '</sheetData><dataValidations><dataValidation type="odd" sqref="A1"/></dataValidations>',
    ),
    "formatting": (
        "xl/worksheets/sheet1.xml",
        r"</sheetData>",
        '</sheetData><conditionalFormatting sqref="??"><cfRule type="new"/></conditionalFormatting>',
    ),
    "names": (
        "xl/workbook.xml",
        r"<calcPr",
        '<definedNames><definedName name="">#</definedName></definedNames><calcPr',
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_odd_decoration_does_not_make_a_workbook_unreadable(name: str) -> None:
    part, old, new = BROKEN[name]

    def change(at: str, data: bytes) -> tuple[str, bytes]:
        if at != part:
            return at, data
        text, n = re.subn(old, new, data.decode(), count=1, flags=re.S)
        assert n
        return at, text.encode()

    found = read(changed(saved(harbour), change))
    assert table_in(found.text)[1] == ["north", "seven", "11"]
    assert ("styles are broken" in found.note) == (name == "styles")


def strict(at: str, data: bytes) -> tuple[str, bytes]:
    return at, re.sub(
        rb"http://schemas.openxmlformats.org/(\w+)/2006/", rb"http://purl.oclc.org/ooxml/\1/", data
    )


def test_strict_macro_template_and_backslash_workbooks_are_read() -> None:
    data = saved(harbour)
    kinds: dict[str, Callable[[str, bytes], tuple[str, bytes]]] = {
        "strict": strict,
        "backslash": lambda at, part: (at.replace("/", "\\"), part),
        "macro": lambda at, part: (
            at,
            part.replace(
                b"vnd.openxmlformats-officedocument.spreadsheetml.sheet.main",
                b"vnd.ms-excel.sheet.macroEnabled.main",
            ),
        ),
        "moved": lambda at, part: (
            at.replace("workbook.xml", "book2.xml"),
            part.replace(b"workbook.xml", b"book2.xml"),
        ),
    }
    for name, change in kinds.items():
        assert table_in(read(changed(data, change)).text)[2] == ["south", "nine", "0000"], name


def test_runs_of_a_cell_are_raised_and_struck() -> None:
    def change(at: str, data: bytes) -> tuple[str, bytes]:
        rich = b'<c r="D2" t="inlineStr">' + RICH.encode() + b'</c></row><row r="3"'
        return at, data.replace(b'</row><row r="3"', rich) if "sheet1" in at else data

    assert table_in(read(changed(saved(harbour), change)).text)[1][3] == "10^6 ~~old~~"


def test_what_stands_beside_the_cells_is_read() -> None:
    out = io.BytesIO()
    book = xlsxwriter.Workbook(out)
    sheet = book.add_worksheet("Fees")
    sheet.write_rich_string(0, 0, "10", book.add_format({"font_script": 1}), "6", " units")
    sheet.write_row(0, 1, ["value"])
    sheet.write(1, 0, 1250, book.add_format({"num_format": '_($* #,##0.00_);_($* (#,##0.00);_($* "-"??_)'}))
    sheet.write_formula(1, 1, "=NA()", None, "#N/A")
    sheet.merge_range("A3:B3", "a merged remark")
    sheet.insert_textbox("E2", "Box text")
    sheet.set_header("&LPort office&RPage &P of &N")
    chart = book.add_chart({"type": "pie"})
    chart.add_series({"values": "=Fees!$A$2:$A$2"})
    chart.set_title({"name": "Shares"})
    book.add_chartsheet("Drawn").set_chart(chart)
    book.close()
    assert read(out.getvalue()).text == (
        "# Fees\n\nPort office\n\n| 10^6 units | value |\n|---|---|\n| $1,250.00 | #N/A |\n"
        "| a merged remark |  |\n\nBox text\n\n# Drawn\n\nChart: Shares"
    )
