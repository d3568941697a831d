"""CSV and TSV files: one table, below the lines of its title."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import islice
from typing import NamedTuple

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, joined_notes, without_controls
from ragserve.ingest.parsers.charset import decode

# in the order in which they are believed: bars and tabs hardly ever stand within a cell
_DELIMITERS = {"\t": "tabs", "|": "bars", ";": "semicolons", ",": "commas"}
_NEVER = "\x1f"  # is in no text, for one column
_SAMPLE = 500  # rows by which a delimiter is judged
_LARGEST_CELL = 2**20  # characters; longer ones come from a quote that is never closed
_MOST_TITLES = 20  # lines above a table
_ALIKE = 0.6  # share of rows with one number of cells from which they are a table's
_VALUE = re.compile(
    r"[-+−(]?[$€£¥]?\s?\d[\d.,' \u00a0\u202f]*\s?[%$€£¥]?\)?"
    r"|\d{1,4}([-./])\d{1,2}\1\d{1,4}([ T]\d[\d:.Z+-]*)?"
    r"|\d{1,2}:\d\d(:\d\d)?"
)  # a number, a date or a time


def parse(raw: Raw) -> Parsed:
    text, note = decode(raw.data, raw.charset)
    text = without_controls(text)
    delimiter = "\t" if raw.ext == ".tsv" and "\t" in text else ""
    if text[:4].lower() == "sep=":  # Excel's own first line
        first, _, text = text.partition("\n")
        delimiter = first[4:5].strip("\r") or delimiter
    lines = list(StringIO(text, newline=""))
    read = _judged(lines, delimiter) if delimiter else _best(lines)
    taken = f"columns split at {_DELIMITERS.get(read.delimiter, repr(read.delimiter))}"
    if not read.delimiter:
        taken = "read as one column"
    rows = _Rows(lines, read)
    titles = [", ".join(filter(None, map(str.strip, row))) for row in islice(rows, read.titles)]
    long = _LongRows(rows)
    table = markdown_table(long)
    note = joined_notes(note, taken, rows.literal_note(), long.note())
    return Parsed("\n\n".join(filter(None, [*titles, table])), "text/csv", note=note)


class _Dialect(NamedTuple):
    """How the lines of a file are cut, and what comes of it. Without a delimiter they are one column."""

    delimiter: str
    spaced: bool = False  # a space follows each delimiter, also before quotes
    titles: int = 0  # rows above the header
    alike: float = 0.0  # share of rows with the usual number of cells
    values: float = 0.0  # share of cells that are a number, a date or a time
    width: int = 1

    def rank(self) -> tuple[bool, bool, float, int]:
        return not self.titles, not self.spaced, self.values, list(_DELIMITERS)[::-1].index(self.delimiter)


class _Rows:
    """Iterates over the rows. A quote that is never closed, or closed within a cell, is taken literally in
    its line, and costs no other line."""

    def __init__(self, lines: Sequence[str], reading: _Dialect) -> None:
        self._literal: list[int] = []
        self._rows = self._read(lines, reading)

    def __iter__(self) -> Iterator[list[str]]:
        return self._rows

    def literal_note(self) -> str:
        """Names the lines in which quotes were taken literally."""
        if not self._literal:
            return ""
        more = ", ..." if len(self._literal) > 10 else ""
        return f"unclosed quotes taken literally in lines {', '.join(map(str, self._literal[:10]))}{more}"

    def _read(self, lines: Sequence[str], reading: _Dialect) -> Iterator[list[str]]:
        delimiter = reading.delimiter or _NEVER
        csv.field_size_limit(_LARGEST_CELL)
        start = 0
        while start < len(lines):
            source = csv.reader(
                islice(lines, start, None),
                delimiter=delimiter,
                skipinitialspace=reading.spaced,
                strict=True,
            )
            done = 0
            try:
                for row in source:
                    done = source.line_num
                    yield row
                return
            except csv.Error:
                start += done
            line = lines[start].rstrip("\r\n")
            row = _cells(line, delimiter)
            if any(cell.startswith('"') for cell in row):
                self._literal.append(start + 1)
            yield row
            start += 1


class _LongRows:
    """Passes rows on, and tells which have more cells than the header: they may be in wrong columns."""

    def __init__(self, rows: Iterator[list[str]] | _Rows) -> None:
        self._found: list[int] = []
        self._rows = rows

    def __iter__(self) -> Iterator[list[str]]:
        width = 0
        for number, row in enumerate(self._rows):
            width = width or len(row)
            if len(row) > width and any(map(str.strip, row[width:])):
                self._found.append(number)
            yield row

    def note(self) -> str:
        shown = ", ".join(map(str, self._found[:10])) + (", ..." if len(self._found) > 10 else "")
        return f"{len(self._found):,} rows have more cells than the header: {shown}" if self._found else ""


def _cells(line: str, delimiter: str) -> list[str]:
    """The cells of a line in which quotes stand within quotes: a quote before a delimiter closes a cell."""
    cut = re.escape(delimiter)
    closing = re.compile(rf'"(?:(?!{cut})\s)*+(?={cut}|$)')
    cells, at, closes = [], 0, True
    while at <= len(line):
        quote = at + len(line[at:]) - len(line[at:].lstrip(" ")) if closes else at
        closed = closing.search(line, quote + 1) if closes and line[quote : quote + 1] == '"' else None
        if closed is not None:
            cells.append(line[quote + 1 : closed.start()].replace('""', '"'))
            at = closed.end() + 1
            continue
        closes = closes and line[quote : quote + 1] != '"'  # or each further quote would look to the end
        end = line.find(delimiter, at)
        end = len(line) if end < 0 else end
        cells.append(line[at:end])
        at = end + 1
    return cells


def _best(lines: Sequence[str]) -> _Dialect:
    """The delimiter by which rows and header become alike; one column if there is none."""
    sample = "".join(lines[: 2 * _SAMPLE])
    found = [_judged(lines, delimiter) for delimiter in _DELIMITERS if delimiter in sample]
    found = [each for each in found if each.width > 1]
    certain = [each for each in found if each.delimiter in "\t|" and each.alike == 1 and not each.titles]
    if certain:
        return certain[0]
    most = max((each.alike for each in found), default=0.0)
    found = [each for each in found if each.alike >= most - 0.1]
    return max(found, key=_Dialect.rank, default=_Dialect(""))


def _judged(lines: Sequence[str], delimiter: str) -> _Dialect:
    """What a delimiter makes of the first rows; ``width`` is 1 if that is no table."""
    sample = lines[: _SAMPLE * 2]
    rows = [row for row in islice(_Rows(sample, _Dialect(delimiter)), _SAMPLE) if any(map(str.strip, row))]
    if not rows:
        return _Dialect(delimiter)
    behind = [cell for row in rows for cell in row[1:] if cell]
    spaced = sum(cell[0] == " " for cell in behind) > len(behind) / 2
    if spaced:
        again = islice(_Rows(sample, _Dialect(delimiter, spaced)), _SAMPLE)
        rows = [row for row in again if any(map(str.strip, row))]
    usual, width = 1, 1
    counted = Counter(len(row) for row in rows)
    usual = max(counted, key=lambda size: (counted[size], size))
    titles = _titles(rows, usual)
    body = rows[titles:]
    alike = sum(len(row) == usual for row in body) / max(1, len(body))
    cells = [cell.strip() for row in body[1:] for cell in row if cell.strip()]
    values = sum(_VALUE.fullmatch(cell) is not None for cell in cells) / max(1, len(cells))
    header = body[0] if body else []
    ragged = not spaced and all(len(row) > 1 for row in body)
    if usual > 1 and (alike >= _ALIKE or ragged) and len(header) > 1 and not _prose(spaced, values, cells):
        width = usual
    if titles == 1 and len(rows[0]) == 1 and not _header_like(body, usual, spaced):
        width = 1
    return _Dialect(delimiter, spaced, titles, alike, values, width)


def _titles(rows: Sequence[Sequence[str]], usual: int) -> int:
    """The number of rows above the header: lines that are far shorter, or have one cell filled, or are above
    a row of names with values below it."""
    first = next((at for at, row in enumerate(rows) if len(row) >= usual), 0)
    if (
        0 < first <= _MOST_TITLES
        and _has_values(rows[first + 1 :])
        and not _has_values(rows[first : first + 1])
    ):
        return first
    for at, row in enumerate(rows[:_MOST_TITLES]):
        padded = usual > 2 and row[0].strip() and not any(map(str.strip, row[1:]))
        if not padded and len(row) > usual / 2:
            return at
    return 0


def _header_like(body: Sequence[Sequence[str]], usual: int, spaced: bool) -> bool:
    """Whether the first row is a header, so that the line above it is a title: the name of a single column
    stands above what looks like rows, too."""
    return not spaced and not _has_values(body[:1]) and (usual > 2 or _has_values(body[1:]))


def _has_values(rows: Sequence[Sequence[str]]) -> bool:
    return any(_VALUE.fullmatch(cell.strip()) for row in rows for cell in row)


def _prose(spaced: bool, values: float, cells: Sequence[str]) -> bool:
    """Whether a delimiter is the punctuation of sentences."""
    words = sum(len(cell.split()) for cell in cells) / max(1, len(cells))
    return spaced and not values and words >= 3
