"""Tables as Markdown: parsers write them, and the chunker finds them by their delimiter rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_DELIMITER = re.compile(r"^[ \t|:-]{3,}\r?$", re.M)  # `|---|:--|`, or not a table at all
_BLANK_LINES = re.compile(r"(?<![ \t])(?:[ \t]*+\r?\n)*+")


class TableSpan(NamedTuple):
    """Offsets of a table in a text: the header with its delimiter row from ``start``, the other rows from
    ``rows`` to ``end``, with the blank lines that follow them.
    """

    start: int
    rows: int
    end: int


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Write rows as a Markdown table, the first as its header. Empty rows and columns are left out."""
    filled = [cells for row in rows if any(cells := [_cell(text) for text in row])]
    width = max(map(len, filled), default=0)
    columns = [at for at in range(width) if any(at < len(row) and row[at] for row in filled)]
    lines = ["| " + " | ".join(row[at] if at < len(row) else "" for at in columns) + " |" for row in filled]
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
