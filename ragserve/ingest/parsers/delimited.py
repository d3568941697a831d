"""CSV and TSV files: one table."""

from __future__ import annotations

import csv
from io import StringIO

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, unreadable, without_controls
from ragserve.ingest.parsers.charset import decode

_DELIMITERS = ",;\t|"
_SAMPLE = 4096  # characters; the time for a guess grows with their square
_LARGEST_CELL = 2**20  # characters; longer ones come from a quote that is never closed


def parse(raw: Raw) -> Parsed:
    text, note = decode(raw.data, raw.charset)
    delimiter = "\t" if raw.ext == ".tsv" else _delimiter(text)
    if text[:4].lower() == "sep=":  # Excel's own first line
        first, _, text = text.partition("\n")
        delimiter = first[4:5].strip("\r") or delimiter
    csv.field_size_limit(_LARGEST_CELL)
    rows = csv.reader(StringIO(without_controls(text), newline=""), delimiter=delimiter)
    try:
        table = markdown_table(rows)
    except csv.Error as error:
        raise unreadable("corrupt", f"not readable as CSV from line {rows.line_num} on ({error})") from error
    return Parsed(table, "text/csv", note=note)


def _delimiter(text: str) -> str:
    sample = text[:_SAMPLE]
    sample = sample[: sample.rfind("\n") + 1] or sample
    try:
        return csv.Sniffer().sniff(sample, _DELIMITERS).delimiter
    except csv.Error:  # one column, or rows of many lengths
        return max(_DELIMITERS, key=sample.split("\n", 1)[0].count)
