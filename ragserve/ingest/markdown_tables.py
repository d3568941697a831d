"""Tables as Markdown: parsers write them, and the chunker finds them by their delimiter rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_DELIMITER = re.compile(r"^[ \t|:-]{3,}\r?$", re.M)  # `|---|:--|`, or not a table at all
_MANY_COLUMNS, _LONG_HEADER = 12, 500  # columns, and characters of a header, that make a table too wide
_BARS = re.compile(r"(?<!\\)\|")  # between cells
_RECORD = 300  # characters of a paragraph of a record
_BLANK_LINES = re.compile(r"(?<![ \t])(?:[ \t]*+\r?\n)*+")


class TableSpan(NamedTuple):
    """Offsets of a table in a text: the header with its delimiter row from ``start``, the other rows from
    ``rows`` to ``end``, with the blank lines that follow them.
    """

    start: int
    rows: int
    end: int


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Write rows as a Markdown table, the first as its header. Empty rows and columns are left out.

    A table of so many columns that a chunk could not hold its header is written as records: paragraphs of
    ``name: value``, each of which begins with the first cell of its row.
    """
    filled = [cells for row in rows if any(cells := [_cell(text) for text in row])]
    width = max(map(len, filled), default=0)
    columns = [at for at in range(width) if any(at < len(row) and row[at] for row in filled)]
    rows = [[row[at] if at < len(row) else "" for at in columns] for row in filled]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if len(columns) >= _MANY_COLUMNS and len(lines) > 1 and len(lines[0]) + 4 * len(columns) > _LONG_HEADER:
        return "\n\n".join(paragraph for row in rows[1:] for paragraph in _record(rows[0], row))
    if lines:
        lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines)


def tables_in(text: str, start: int, end: int) -> Iterator[TableSpan]:
    """Yield the Markdown tables in ``text[start:end]``, in order."""
    at = start
    while found := _DELIMITER.search(text, at, end):
        at = found.end()
        header = max(start, text.rfind("\n", start, max(start, found.start() - 1)) + 1)
        above, delimiter = text[header : found.start()], found.group()
        if not (0 < _width(above) == _width(delimiter) and "-" in delimiter and above.strip(" \t\r\n|")):
            continue
        rows = min(end, at + 1)
        at = _end_of_rows(text, rows, end)
        yield TableSpan(header, rows, at)


def with_records(text: str) -> str:
    """A text whose tables of very many columns have become records, see `markdown_table`."""
    parts, at = [], 0
    for table in tables_in(text, 0, len(text)):
        lines = text[table.start : table.end].strip().splitlines()
        names = _cells_of(lines[0])
        if len(names) >= _MANY_COLUMNS and len(lines[0]) + 4 * len(names) > _LONG_HEADER:
            rows = [_cells_of(line) for line in lines[2:] if line.strip()]
            parts += [text[at : table.start], markdown_table([names, *rows]), "\n\n"]
            at = table.end
    return "".join([*parts, text[at:]])


def _cells_of(row: str) -> list[str]:
    cells = _BARS.split(row.strip().removeprefix("|").removesuffix("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _record(names: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    """Yield the fields of a row in paragraphs that fit into a chunk."""
    fields = [f"{name}: {value}" if name else value for name, value in zip(names, row, strict=True) if value]
    fields = [field.replace("\\|", "|") for field in fields]
    line = first = fields[0] if row[0] else ""
    for field in fields[1:] if first else fields:
        if len(line) + len(field) > _RECORD and line != first:
            yield line
            line = first
        line = f"{line}; {field}" if line else field
    yield line


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _width(row: str) -> int:
    """The number of cells; 0 for a line that is no row of a table."""
    row = row.strip().replace("\\|", "")
    return row.removeprefix("|").removesuffix("|").count("|") + 1 if "|" in row else 0


def _end_of_rows(text: str, at: int, end: int) -> int:
    while at < end:
        newline = text.find("\n", at, end)
        stop = end if newline < 0 else newline + 1
        if text.find("|", at, stop) < 0:
            break
        at = stop
    blank = _BLANK_LINES.match(text, at, end)
    return blank.end() if blank else at
