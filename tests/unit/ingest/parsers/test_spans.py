"""Tables whose cells span rows and columns, written by the libraries that write such files: each text comes
back in the first place of its cell, and nothing else does."""

from __future__ import annotations

import io
from collections.abc import Callable
from email.message import EmailMessage
from html import escape
from typing import Any, NamedTuple

import docx
import openpyxl
import pptx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.ingest.parsers import Raw, parse
from tests.unit.ingest.ingest_samples import make_epub
from tests.unit.ingest.parsers.table_texts import table_in, written

_LONG = "<p>" + "The rules hold until further notice for all of the wards of the north. " * 8 + "</p>"


class _Cell(NamedTuple):
    row: int
    column: int
    down: int
    across: int
    text: str


class _Table(NamedTuple):
    rows: int
    columns: int
    cells: list[_Cell]

    def grid(self) -> list[list[str]]:
        texts = [[""] * self.columns for _ in range(self.rows)]
        for cell in self.cells:
            texts[cell.row][cell.column] = cell.text
        return texts


# no text of cells that ends lines, is an escape of workbooks, or is taken for a formula or a number
_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=6).map(
    lambda text: f"w{text.replace('_x', 'x')}"
)


@st.composite
def _tables(draw: st.DrawFn) -> _Table:
    """Tables with spans beside the first two columns, which make rows of a sheet one region."""
    rows, columns = draw(st.integers(2, 5)), draw(st.integers(3, 6))
    taken: set[tuple[int, int]] = set()
    cells = []
    for row in range(rows):
        for column in range(columns):
            if (row, column) in taken:
                continue
            down, across = draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) if column > 1 else (1, 1)
            down = min(down, rows - row)
            while across > 1 and (column + across > columns or (row, column + across - 1) in taken):
                across -= 1
            if across > 1 and any((row, column + at) in taken for at in range(across)):
                across = 1
            taken |= {(row + y, column + x) for y in range(down) for x in range(across)}
            cells.append(_Cell(row, column, down, across, draw(_TEXT)))
    return _Table(rows, columns, cells)


def _saved(save: Callable[[Any], object]) -> bytes:
    out = io.BytesIO()
    save(out)
    return out.getvalue()


def _fill(table: Any, cells: list[_Cell]) -> None:
    for row, column, down, across, text in cells:
        first = table.cell(row, column)
        if down > 1 or across > 1:
            first.merge(table.cell(row + down - 1, column + across - 1))
        first.text = text


def _docx(table: _Table) -> bytes:
    document: Any = docx.Document()
    _fill(document.add_table(table.rows, table.columns), table.cells)
    return _saved(document.save)


def _pptx(table: _Table) -> bytes:
    deck: Any = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[6])
    _fill(slide.shapes.add_table(table.rows, table.columns, 0, 0, 9000, 9000).table, table.cells)
    return _saved(deck.save)


def _xlsx(table: _Table) -> bytes:
    book: Any = openpyxl.Workbook()
    for row, column, down, across, text in table.cells:
        book.active.cell(row + 1, column + 1, text)
        if down > 1 or across > 1:
            book.active.merge_cells(None, row + 1, column + 1, row + down, column + across)
    return _saved(book.save)


def _html(table: _Table) -> str:
    rows = (
        "".join(
            f"<td rowspan={cell.down} colspan={cell.across}>{escape(cell.text)}</td>"
            for cell in table.cells
            if cell.row == row
        )
        for row in range(table.rows)
    )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _page(table: _Table, rest: str = "") -> bytes:
    return f"<html><body><article>{rest}{_html(table)}{rest}</article></body></html>".encode()


def _eml(table: _Table) -> bytes:
    mail = EmailMessage()
    mail.set_content(_html(table), subtype="html")
    return mail.as_bytes()


WRITERS: dict[str, tuple[str, Callable[[_Table], bytes]]] = {
    "docx": (".docx", _docx),
    "pptx": (".pptx", _pptx),
    "xlsx": (".xlsx", _xlsx),
    "html": (".html", _page),
    "long html": (".html", lambda table: _page(table, _LONG)),
    "eml": (".eml", _eml),
    "epub": (".epub", lambda table: make_epub({"a.xhtml": _html(table)})),
}


@pytest.mark.parametrize("kind", WRITERS)
@given(_tables())
def test_a_table_with_spans_comes_back_cell_for_cell(kind: str, table: _Table) -> None:
    ext, write = WRITERS[kind]
    found = parse(Raw(write(table), f"a{ext}", ext))
    assert table_in(found.text) == written(table.grid())
