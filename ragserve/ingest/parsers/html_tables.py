"""Tables of HTML: those of data are laid out as grids, those that arrange a page become blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ragserve.ingest.parsers.grid import Grid

_MOST_COLUMNS, _MOST_ROWS = 1000, 65534  # that a cell may span, by the standard of HTML
_DIGITS = re.compile(r"\A\s*+(\d{1,6})")
_LOOSE_ENDS = ("table", "div", "p", "ul", "ol", "dl", "pre", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6")
_ROLES = {"table": "table", "grid": "table", "row": "tr", "rowgroup": "tbody"} | {
    **dict.fromkeys(("cell", "gridcell"), "td"),
    **dict.fromkeys(("columnheader", "rowheader"), "th"),
}
_PARTS = ("thead", "tbody", "tfoot")


def lay_out_tables(tree: Any, text_of: Callable[[Any], str]) -> None:
    """Rewrite each table of data without spans, its first row as header cells, its caption before it.

    ``text_of`` gives the text of a cell. A table in a cell of another one is a part of its text; if the outer
    table has no header cells and no caption, it arranges the page and becomes blocks.
    """
    for node in tree.iter("div", "span", "ul", "li"):
        if role := node.get("role"):
            node.tag = _ROLES.get(role, node.tag)
    for table in reversed(list(tree.iter("table"))):
        has_tables = table.find(".//table") is not None
        headed = table.find("caption") is not None or any(
            cell.tag == "th" for row, _ in _rows(table) for cell in row
        )
        if table.get("role") in ("presentation", "none") or (has_tables and not headed):
            _unwrap(table)
            continue
        _put_caption_first(table, text_of)
        if has_tables:
            for inner in list(table.iter("table")):
                if inner is not table:
                    _flatten(inner)
        rows = _grid(table, text_of)
        if sum(map(any, rows)) > 1 and len(rows[0]) > 1:
            _rewrite(table, rows)
        else:
            _unwrap(table)


def cells_of(table: Any) -> list[list[str]]:
    """The texts of the cells of a table that has been laid out; empty if it holds no data."""
    rows = [["".join(cell.itertext()) for cell in row] for row, _ in _rows(table)]
    return rows if len(rows) > 1 and max(map(len, rows)) > 1 else []


def _rows(table: Any) -> Iterator[tuple[list[Any], int]]:
    """Yield the cells of each row, and how many rows its part of the table goes on for, itself included."""
    parts: list[list[Any]] = []
    loose: list[Any] | None = None
    for child in table:
        if child.tag == "tr":
            if loose is None:
                loose = []
                parts.append(loose)
            loose.append(child)
        elif child.tag in _PARTS:
            loose = None
            rows = [row for row in child if row.tag == "tr"]
            parts.insert(0, rows) if child.tag == "thead" else parts.append(rows)
    foot = [[row for row in child if row.tag == "tr"] for child in table if child.tag == "tfoot"]
    ordered = [part for part in parts if part not in foot] + foot  # shown last, wherever it stands
    for part in ordered:
        for at, row in enumerate(part):
            yield [cell for cell in row if cell.tag in ("td", "th")], len(part) - at


def _grid(table: Any, text_of: Callable[[Any], str]) -> list[list[str]]:
    grid = Grid()
    for number, (cells, left) in enumerate(_rows(table)):
        for cell in cells:
            down = _span(cell.get("rowspan"), _MOST_ROWS)
            across = max(1, _span(cell.get("colspan"), _MOST_COLUMNS))
            text = " ".join(text_of(cell).split())
            grid.add(number, text, left if down == 0 else min(down, left), across)
    rows = [row for row in grid.rows() if any(row)]
    columns = [at for at in range(len(rows[0]) if rows else 0) if any(row[at] for row in rows)]
    return [[row[at] for at in columns] for row in rows]


def _span(value: str | None, most: int) -> int:
    found = _DIGITS.match(value or "")
    return min(int(found.group(1)), most) if found else 1


def _put_caption_first(table: Any, text_of: Callable[[Any], str]) -> None:
    """Make a table's caption a paragraph before it."""
    from lxml import etree  # type: ignore[import-untyped]

    caption = table.find("caption")
    if caption is None or table.getparent() is None:
        return
    if name := text_of(caption).strip():
        above = etree.Element("p")
        above.text = name
        table.addprevious(above)
    table.remove(caption)


def _rewrite(table: Any, rows: list[list[str]]) -> None:
    from lxml import etree

    tail = table.tail
    table.clear()
    table.tail = tail
    for number, row in enumerate(rows):
        line = etree.SubElement(table, "tr")
        for text in row:
            etree.SubElement(line, "td" if number else "th").text = text


def _unwrap(table: Any) -> None:
    """Make a table's rows and cells blocks; tables within stay."""
    for row in [table, *(each for each in table if each.tag in _PARTS)]:
        for line in row:
            if line.tag == "tr":
                for cell in line:
                    if cell.tag in ("td", "th"):
                        cell.tag = "div"
                        _wrap(cell)
                line.tag = "div"
    for part in table:
        part.tag = "div" if part.tag in _PARTS else part.tag
    table.tag = "div"


def _wrap(cell: Any) -> None:
    """Make paragraphs of the loose text beside the blocks in a cell, which is else taken for theirs."""
    from lxml import etree

    if next(cell.iterchildren("table", "div", "p", "ul", "ol"), None) is None:
        cell.tag = "p"
        return
    run: Any = etree.Element("p")
    run.text, cell.text = cell.text, None
    for child in [*cell, None]:
        if child is not None and child.tag not in _LOOSE_ENDS:
            run.append(child)
            continue
        if len(run) or (run.text or "").strip():
            if child is None:
                cell.append(run)
            else:
                child.addprevious(run)
        if child is not None:
            run = etree.Element("p")
            run.text, child.tail = child.tail, None


def _flatten(table: Any) -> None:
    """Write a table in a cell as text: its cells apart by commas, its rows by semicolons."""
    rows = [
        ", ".join(filter(None, (" ".join("".join(c.itertext()).split()) for c in cells)))
        for cells, _ in _rows(table)
    ]
    tail = table.tail
    table.clear()
    table.tail = tail
    table.tag = "div"
    table.text = "; ".join(filter(None, rows))
