"""Excel workbooks: a page per sheet, and a table per region of cells, with the values last computed."""

from __future__ import annotations

import datetime
import warnings
from io import BytesIO
from typing import Any

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, container_errors, paged

MIME = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"


def parse(raw: Raw) -> Parsed:
    import openpyxl
    from openpyxl.utils.exceptions import InvalidFileException

    with container_errors("an Excel workbook", InvalidFileException), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about extensions and styles that it does not know
        book = openpyxl.load_workbook(BytesIO(raw.data), read_only=True, data_only=True, keep_links=False)
        try:
            pages = [_sheet(sheet) for sheet in book.worksheets]
            names = [sheet.title for sheet in book.worksheets]
            title = book.properties.title or ""
        finally:
            book.close()
    return paged(pages, MIME, "sheet", names=names, title=title)


def _sheet(sheet: Any) -> str:
    """The sheet's regions below its name. Blank rows end a region if the next row is all text, as a header;
    other rows go on under the header before them."""
    sheet.reset_dimensions()  # the sheet may claim to have a million columns
    regions: list[list[list[str]]] = []
    blank = False
    for row in sheet.iter_rows(values_only=True):
        cells = [_text(value) for value in row]
        if not any(cells):
            blank = True
            continue
        header = blank and all(isinstance(value, str) for value in row if value is not None)
        if header or not regions:
            regions.append([])
        regions[-1].append(cells)
        blank = False
    if not regions:
        return ""
    return "\n\n".join([f"# {sheet.title}", *map(_region, regions)])


def _region(rows: list[list[str]]) -> str:
    """The region's table, below the titles in front of it: rows of one cell."""
    sizes = [sum(map(bool, row)) for row in rows]
    titles = next((at for at, size in enumerate(sizes) if size > 1), 0)
    if len(rows) == 1 + titles:
        titles += 1
    lines = [" | ".join(filter(None, row)) for row in rows[:titles]]
    return "\n\n".join(filter(None, [*lines, markdown_table(rows[titles:])]))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.15g}"  # the digits that Excel keeps
    if isinstance(value, datetime.datetime):
        day = value.time() == datetime.time()
        return value.date().isoformat() if day else value.isoformat(" ", "seconds")
    return str(value)
