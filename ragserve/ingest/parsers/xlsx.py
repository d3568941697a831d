"""Excel workbooks: a page per sheet, and a table per region of cells, with the values that a reader sees."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import (
    Parsed,
    Raw,
    container_errors,
    joined_notes,
    left_out,
    one_line,
    paged,
)
from ragserve.ingest.parsers.number_formats import plain_number, shown, text_shown
from ragserve.ingest.parsers.ooxml import (
    Package,
    as_int,
    drawing_text,
    is_on,
    is_page_number,
    relation_id,
)
from ragserve.ingest.parsers.ooxml_charts import related_text
from ragserve.ingest.parsers.small_text import Run, joined_runs, struck
from ragserve.ingest.parsers.xlsx_styles import MAIN, CellStyle, cell_styles, is_struck

MIME = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"

_ESCAPED = re.compile(r"_x([0-9A-Fa-f]{4})_")
_PLACE = re.compile(r"([A-Z]{1,3})(\d+)", re.I)
_COLUMNS = 16384
_HEADER_CODES = re.compile(r'&(?:"[^"]*"|\d+|K[0-9A-F]{6}|K\d\d[+-]\d{3}|[A-Z&])', re.I)
_DRAWN = "{http://schemas.openxmlformats.org/drawingml/2006/spreadsheetDrawing}"
_THREADED = "{http://schemas.microsoft.com/office/spreadsheetml/2018/threadedcomments}threadedComment"


class _Cell(NamedTuple):
    text: str
    is_text: bool = True


_Row = dict[int, _Cell]  # by column, from 1


class _Hidden(NamedTuple):
    rows: set[int]
    columns: set[int]

    def has(self, place: str) -> bool:
        column, row = _position(place)
        return row in self.rows or column in self.columns


def parse(raw: Raw) -> Parsed:
    with container_errors("an Excel workbook"):
        return _Workbook(raw).parsed()


class _Workbook:
    def __init__(self, raw: Raw) -> None:
        self._package = package = Package(raw.data)
        self._take_hidden, self._take_comments = raw.hidden, raw.comments
        self._part = package.main_part("xlsx")
        self._book = package.xml(self._part)
        self._styles, self._broken = self._read_styles()
        self._strings = self._shared_strings()
        properties = self._book.find(f"{MAIN}workbookPr")
        self._from_1904 = properties is not None and is_on(properties.get("date1904") or "0")
        self._left_out: Counter[str] = Counter()
        self._unvalued = 0  # formulas without a stored value

    def parsed(self) -> Parsed:
        sheets = list(self._book.iterfind(f"{MAIN}sheets/{MAIN}sheet"))
        if not sheets:
            raise KeyError("there are no sheets")
        pages, names = [], []
        for sheet in sheets:
            relation = self._package.relation(self._part, relation_id(sheet))
            if relation is None or relation.target not in self._package:
                self._left_out["sheets that are missing"] += 1
                pages.append("")
                names.append("")
                continue
            if not self._take_hidden and sheet.get("state") in ("hidden", "veryHidden"):
                self._left_out["hidden sheets"] += 1
                pages.append("")
                names.append("")
                continue
            names.append(one_line(sheet.get("name") or ""))
            pages.append(self._sheet(names[-1], relation.target))
        formulas = f"{self._unvalued:,} formulas without a stored value are blank (save the file in Excel)"
        note = joined_notes(
            self._package.damage(),
            "styles are broken: numbers are read as stored" if self._broken else "",
            left_out(self._left_out),
            formulas if self._unvalued else "",
        )
        return paged(pages, MIME, "sheet", names=names, title=self._package.title(), note=note)

    def _read_styles(self) -> tuple[list[CellStyle], bool]:
        part = next(self._package.related(self._part, "styles"), None)
        root = self._package.optional_xml(part)
        return cell_styles(root), part is not None and root is None

    def _shared_strings(self) -> list[str]:
        part = next(self._package.related(self._part, "sharedStrings"), "xl/sharedStrings.xml")
        return (
            []
            if part not in self._package
            else [_string(node) for node in self._package.elements(part, f"{MAIN}si")]
        )

    def _sheet(self, name: str, part: str) -> str:
        """The sheet's regions below its name. Blank rows end a region if the next row is all text, as a
        header; other rows go on under the header before them."""
        regions: list[list[_Row]] = []
        blank = False
        hidden = _Hidden(set(), set())
        heads: list[str] = []
        for row in self._rows(part, hidden, heads):
            if not row:
                blank = True
                continue
            header = blank and all(cell.is_text for cell in row.values())
            if header or not regions:
                regions.append([])
            regions[-1].append(row)
            blank = False
        texts = [*heads, *map(_region, regions), *self._beside(part, hidden)]
        return "\n\n".join([f"# {name}", *texts]) if texts else ""

    def _rows(self, part: str, hidden: _Hidden, heads: list[str]) -> Iterator[_Row]:
        """Yield the rows, blank ones too; fill in what is hidden, and what is printed above and below."""
        number = 0
        tags = (f"{MAIN}{name}" for name in ("col", "row", "headerFooter"))
        for node in self._package.elements(part, *tags):
            if node.tag == f"{MAIN}col":
                if not self._take_hidden and (
                    is_on(node.get("hidden") or "0") or _is_zero(node.get("width"))
                ):
                    first, last = as_int(node.get("min"), 1), as_int(node.get("max"), 1)
                    hidden.columns.update(range(first, min(last, _COLUMNS) + 1))
                continue
            if node.tag == f"{MAIN}headerFooter":
                found = (text for each in node for text in re.split("&[LCR]", each.text or ""))
                texts = (one_line(_HEADER_CODES.sub(" ", text)) for text in found)
                heads += dict.fromkeys(text for text in texts if not is_page_number(text))
                continue
            before, number = number, as_int(node.get("r"), number + 1)
            if number > before + 1:
                yield {}
            row = self._cells(node)
            if row and not self._take_hidden:
                if is_on(node.get("hidden") or "0") or _is_zero(node.get("ht")):
                    hidden.rows.add(number)
                    self._left_out["hidden rows"] += 1
                    continue
                seen = {column: cell for column, cell in row.items() if column not in hidden.columns}
                self._left_out["cells of hidden columns"] += len(row) - len(seen)
                if not seen:
                    continue
                row = seen
            yield row

    def _cells(self, row: Any) -> _Row:
        cells: _Row = {}
        column = 0
        for node in row.iterchildren(f"{MAIN}c"):
            place = _position(node.get("r") or "")[0]
            column = place or column + 1
            style = self._style(node.get("s"))
            cell = self._cell(node, style)
            if not cell.text or column > _COLUMNS:
                continue
            if style.unseen and not self._take_hidden:
                self._left_out["cells in the colour of their ground"] += 1
                continue
            cells[column] = cell._replace(text=struck(cell.text)) if style.struck else cell
        return cells

    def _style(self, number: str | None) -> CellStyle:
        place = as_int(number)
        return self._styles[place] if 0 <= place < len(self._styles) else CellStyle()

    def _cell(self, node: Any, style: CellStyle) -> _Cell:
        kind = node.get("t") or "n"
        if kind == "inlineStr":
            found = node.find(f"{MAIN}is")
            return _Cell(text_shown("" if found is None else _string(found), style.code))
        stored = node.findtext(f"{MAIN}v") or ""
        if not stored.strip() and kind != "str":
            self._unvalued += node.find(f"{MAIN}f") is not None
            return _Cell("")
        if kind == "s":
            place = as_int(stored, -1)
            if not 0 <= place < len(self._strings):
                self._left_out["texts that are missing"] += 1
                return _Cell("")
            return _Cell(text_shown(self._strings[place], style.code))
        if kind == "b":
            return _Cell("TRUE" if is_on(stored.strip()) else "FALSE", False)
        if kind == "n":
            number = stored.strip()
            code = style.code
            text = (
                plain_number(number) if code == "General" else shown(number, code, from_1904=self._from_1904)
            )
            return _Cell(text, False)
        if kind == "d":
            return _Cell(re.sub(r"T00:00:00(\.0+)?Z?$", "", stored.strip()).replace("T", " "), False)
        return _Cell(_unescaped(stored), kind == "str")  # "e" is an error such as #N/A

    def _beside(self, part: str, hidden: _Hidden) -> Iterator[str]:
        """Yield what floats above the cells: comments, text boxes, pictures' descriptions, charts' titles."""
        yield from self._comments(part, hidden)
        for drawing in self._package.related(part, "drawing"):
            root = self._package.optional_xml(drawing)
            for node in root.iter() if root is not None else ():
                if node.tag == f"{_DRAWN}txBody":
                    yield from filter(None, [drawing_text(node)])
                elif node.tag == f"{_DRAWN}cNvPr" and (described := one_line(node.get("descr") or "")):
                    yield f"[Image: {described}]"
            yield from related_text(self._package, drawing, values=False)

    def _comments(self, part: str, hidden: _Hidden) -> Iterator[str]:
        found: dict[str, list[str]] = {}
        for root in self._package.roots(part, "threadedComment"):
            for node in root.iter(_THREADED):
                text = "".join(each.text or "" for each in node if str(each.tag).endswith("}text"))
                found.setdefault(node.get("ref") or "", []).append(text)
        threaded = set(found)
        for root in self._package.roots(part, "comments"):
            for node in root.iter(f"{MAIN}comment"):
                text = node.find(f"{MAIN}text")
                if text is not None and (ref := node.get("ref") or "") not in threaded:
                    found.setdefault(ref, []).append(_string(text))
        shown = {ref: texts for ref, texts in found.items() if not hidden.has(ref)}
        if not self._take_comments:
            self._left_out["comments"] += sum(map(len, shown.values()))
            return
        for ref, texts in shown.items():
            yield from (f"[Comment on {ref}: {text}]" for text in map(one_line, texts) if text)


def _is_zero(size: str | None) -> bool:
    """Whether a column's width or a row's height is given and nothing."""
    return bool(size) and not (size or "").strip("0.")


def _string(node: Any) -> str:
    """The text of a string, whose runs may be raised, lowered or struck out; without readings of kanji."""
    runs = []
    for child in node:
        if child.tag == f"{MAIN}t":
            runs.append(Run(child.text or ""))
        elif child.tag == f"{MAIN}r":
            look = child.find(f"{MAIN}rPr")
            place = None if look is None else look.find(f"{MAIN}vertAlign")
            value = "" if place is None else place.get("val")
            text = "".join(t.text or "" for t in child.iterchildren(f"{MAIN}t"))
            raised = {"superscript": 1, "subscript": -1}.get(value or "", 0)
            runs.append(Run(text, raised, look is not None and is_struck(look)))
    return _unescaped(joined_runs(runs))


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text) if "_x" in text else text


def _position(place: str) -> tuple[int, int]:
    """Column and row of ``B7``, from 1; zeros for no place."""
    match = _PLACE.fullmatch(place.replace("$", ""))
    if match is None:
        return 0, 0
    column = 0
    for letter in match[1].upper():
        column = column * 26 + ord(letter) - ord("A") + 1
    return column, int(match[2])


def _region(rows: Sequence[_Row]) -> str:
    """The region's table, below the titles in front of it: rows of one cell."""
    titles = next((at for at, row in enumerate(rows) if len(row) > 1), 0)
    if len(rows) == 1 + titles:
        titles += 1
    lines = [" | ".join(row[column].text for column in sorted(row)) for row in rows[:titles]]
    columns = sorted(set().union(*rows[titles:]))
    empty = _Cell("")
    table = markdown_table([row.get(column, empty).text for column in columns] for row in rows[titles:])
    return "\n\n".join(filter(None, [*lines, table]))
