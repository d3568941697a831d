"""Reading back the Markdown tables that parsers write."""

from __future__ import annotations

import re


def table_in(text: str) -> list[list[str]]:
    """The cells of the first table of a text; empty without one."""
    lines = text.split("\n")
    start = next((at for at, line in enumerate(lines) if re.fullmatch(r"\|(---\|)+", line)), 0)
    if not start:
        return []
    rows = [lines[start - 1]]
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append(line)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def written(rows: list[list[str]]) -> list[list[str]]:
    """The rows as a table shows them: without blank rows and columns, each cell on one line."""
    rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows if any(row)]
    rows = [row for row in rows if any(row)]
    columns = [at for at in range(max(map(len, rows), default=0)) if any(row[at] for row in rows)]
    return [[row[at] for at in columns] for row in rows]
