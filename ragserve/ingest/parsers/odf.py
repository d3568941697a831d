"""OpenDocument texts, sheets and slides (``.odt``, ``.ods``, ``.odp``), read part by part as Word files are.

Of the libraries, odfdo takes hidden text for text and loses merged cells, and odfpy is not kept any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import (
    Parsed,
    Raw,
    container_errors,
    joined_notes,
    left_out,
    one_line,
    paged,
    unreadable,
    without_controls,
)
from ragserve.ingest.parsers.odf_styles import (
    DRAW,
    OFFICE,
    PRESENTATION,
    STYLE,
    SVG,
    TABLE,
    TEXT,
    Numbers,
    OdfLook,
    OdfStyles,
)
from ragserve.ingest.parsers.ooxml import Package, as_int, is_page_number
from ragserve.ingest.parsers.small_text import Run, joined_runs

MIME = "application/vnd.oasis.opendocument."
_DC = "{http://purl.org/dc/elements/1.1/}"
_MOST_REPEATS = 100  # of a cell or a row that says something: more fill a sheet
_MOST_COLUMNS = 16_384  # LibreOffice's
_MOST_CELLS = 2_000_000  # of a sheet
_SKIPPED = frozenset(
    [
        *(f"{TEXT}{name}" for name in ("tracked-changes", "page-number", "page-count", "sequence-decls")),
        *(f"{TEXT}{name}" for name in ("variable-decls", "user-field-decls", "bibliography-configuration")),
        *(f"{OFFICE}{name}" for name in ("forms", "scripts", "binary-data")),
    ]
)
_PLAIN = {f"{TEXT}tab": "\t", f"{TEXT}line-break": "\n"}
_PARAGRAPHS = (f"{TEXT}p", f"{TEXT}h")


def parse(raw: Raw) -> Parsed:
    with container_errors("an OpenDocument file"):
        package = Package(raw.data)
        manifest = package.read("META-INF/manifest.xml") if "META-INF/manifest.xml" in package else b""
        if b"encryption-data" in manifest:
            raise unreadable("encrypted", "an OpenDocument file with a password (remove the password)")
        return _OpenDocument(raw, package).parsed()


class _OpenDocument:
    def __init__(self, raw: Raw, package: Package) -> None:
        self._package = package
        self._take_hidden, self._take_comments = raw.hidden, raw.comments
        self._content = package.xml("content.xml")
        self._masters = package.optional_xml("styles.xml")
        roots = [root for root in (self._masters, self._content) if root is not None]
        self._styles = OdfStyles(roots)
        self._left_out: Counter[str] = Counter()
        self._numbers: dict[int, Numbers] = {}
        self._headings = Numbers()
        self._said: set[str] = set()  # headers and footers of slides
        self._below: list[str] = []  # what stands below a paragraph: notes, comments, boxes, descriptions

    def parsed(self) -> Parsed:
        body = self._content.find(f"{OFFICE}body")
        kind = next((node for node in body if isinstance(node.tag, str)), None) if body is not None else None
        if kind is None:
            raise KeyError("there is no body")
        what = kind.tag.removeprefix(OFFICE)
        if what == "spreadsheet":
            sheets = list(kind.iterchildren(f"{TABLE}table"))
            pages = [self._sheet(sheet) for sheet in sheets]
            names = [one_line(sheet.get(f"{TABLE}name") or "") for sheet in sheets]
            return paged(
                pages, f"{MIME}spreadsheet", "sheet", names=names, title=self._title(), note=self._note()
            )
        if what in ("presentation", "drawing"):
            slides = [self._slide(page) for page in kind.iterchildren(f"{DRAW}page")]
            return paged(slides, f"{MIME}{what}", "slide", title=self._title(), note=self._note())
        if what != "text":
            raise UnsupportedDocument(f"no parser for an OpenDocument {what} (save it as PDF)")
        blocks = [*self._furniture(), *self._blocks(kind, OdfLook())]
        text = without_controls("\n\n".join(blocks))
        title = self._title() or next((b.lstrip("# ") for b in blocks if b.startswith("# ")), "")
        return Parsed(text, f"{MIME}text", title, note=self._note())

    def _title(self) -> str:
        meta = self._package.optional_xml("meta.xml")
        return one_line(meta.findtext(f".//{_DC}title") or "") if meta is not None else ""

    def _note(self) -> str:
        return joined_notes(self._package.damage(), left_out(self._left_out))

    # texts

    def _blocks(self, parent: Any, look: OdfLook) -> Iterator[str]:
        """Yield the paragraphs, lists and tables of an element."""
        for node in parent:
            if not isinstance(node.tag, str) or node.tag in _SKIPPED or self._is_hidden(node):
                continue
            if node.tag in _PARAGRAPHS:
                yield from self._paragraph(node, look)
            elif node.tag == f"{TEXT}list":
                yield from self._list(node, look)
            elif node.tag == f"{TABLE}table":
                yield from filter(None, [self._table(node)])
            elif node.tag == f"{TEXT}section" and node.get(f"{TEXT}display") in ("none", "condition"):
                yield from self._hidden_section(node, look)
            else:  # sections, indexes, frames, text boxes and what else holds paragraphs
                yield from self._described(node)
                yield from self._blocks(node, look)

    def _is_hidden(self, node: Any) -> bool:
        """Whether a shape is hidden, or says nothing but a number; comments of slides are read here."""
        if node.tag.endswith("}annotation"):
            self._comment(node)
            return True
        if node.get(f"{PRESENTATION}class") == "page-number":
            return True
        if self._take_hidden or not any(key.endswith("}display") for key in node.attrib):
            return False
        hidden = node.tag.startswith(DRAW) and "none" in node.attrib.values()
        self._left_out["hidden shapes"] += hidden
        return hidden

    def _hidden_section(self, node: Any, look: OdfLook) -> Iterator[str]:
        if self._take_hidden:
            yield from self._blocks(node, look)
        else:
            self._left_out["hidden passages"] += 1

    def _paragraph(self, node: Any, look: OdfLook) -> Iterator[str]:
        own = self._styles.look("paragraph", node.get(f"{TEXT}style-name")).within(look)
        text = self._text(node, own)
        below, self._below = self._below, []
        if text:
            if node.tag == f"{TEXT}h":
                level = max(1, as_int(node.get(f"{TEXT}outline-level"), 1))
                number = (
                    self._headings.next(self._styles.outline, level)
                    if self._styles.outline is not None
                    else ""
                )
                text = f"{'#' * min(level, 6)} {f'{number} ' if number else ''}{one_line(text)}"
            yield text
        yield from below

    def _text(self, node: Any, look: OdfLook) -> str:
        runs: list[Run] = []
        hidden: list[str] = []
        self._read(node, look, runs, hidden)
        if any(text.strip() for text in hidden):
            self._left_out["hidden passages"] += 1
        return joined_runs(runs).strip()

    def _read(self, top: Any, look: OdfLook, runs: list[Run], hidden: list[str]) -> None:
        """Add the runs of an element, and what is left out of it."""

        def add(text: str | None, own: OdfLook) -> None:
            if text and own.hidden and not self._take_hidden:
                hidden.append(text)
            elif text:
                runs.append(Run(text, own.place or 0, bool(own.struck)))

        stack: list[tuple[Any, OdfLook]] = [(top, look)]
        while stack:
            node, own = stack.pop()
            if isinstance(node, str):
                add(_collapsed(node), own)
                continue
            inner = own
            tag = node.tag
            if tag in (f"{TEXT}span", f"{TEXT}a"):
                inner = self._styles.look("text", node.get(f"{TEXT}style-name")).within(own)
            elif tag in (f"{TEXT}hidden-text", f"{TEXT}hidden-paragraph"):
                inner = OdfLook(hidden=True).within(own)
            children: list[tuple[Any, OdfLook]] = []
            if node is top or not self._is_mark(node, inner, add):
                if node.text:
                    children.append((node.text, inner))
                for child in node:
                    if isinstance(child.tag, str) and child.tag not in _SKIPPED:
                        children.append((child, inner))
                    if child.tail:
                        children.append((child.tail, inner))
            stack += reversed(children)

    def _is_mark(self, node: Any, look: OdfLook, add: Any) -> bool:
        """Read what is no plain text; False for what only holds some."""
        tag = node.tag
        if tag == f"{TEXT}s":
            add(" " * min(as_int(node.get(f"{TEXT}c"), 1), 64), look)
        elif tag in _PLAIN:
            add(_PLAIN[tag], look)
        elif tag == f"{TEXT}note":
            self._footnote(node, add, look)
        elif tag == f"{OFFICE}annotation":
            self._comment(node)
        elif tag == f"{TEXT}ruby":
            base, above = node.find(f"{TEXT}ruby-base"), node.find(f"{TEXT}ruby-text")
            read = "".join(above.itertext()) if above is not None else ""
            add("".join(base.itertext()) + (f"({read})" if read else "") if base is not None else "", look)
        elif tag.startswith(DRAW):
            self._below += [*self._described(node), *self._drawn(node)]
        else:
            return False
        return True

    def _footnote(self, node: Any, add: Any, look: OdfLook) -> None:
        body, citation = node.find(f"{TEXT}note-body"), node.find(f"{TEXT}note-citation")
        mark = one_line("".join(citation.itertext())) if citation is not None else ""
        if mark:
            add(f"[{mark}]", look._replace(place=0))
        before, self._below = self._below, []
        text = one_line(" ".join(self._blocks(body, OdfLook()))) if body is not None else ""
        said = [f"[{mark}] {text}" if mark else f"[Note: {text}]"] if text else []
        self._below = [*before, *self._below, *said]

    def _comment(self, node: Any) -> None:
        if not self._take_comments:
            self._left_out["comments"] += 1
            return
        author = one_line(node.findtext(f"{_DC}creator") or "")
        before, self._below = self._below, []
        text = " ".join(self._blocks(node, OdfLook()))
        self._below = [*before, f"[Comment{f' by {author}' if author else ''}: {one_line(text)}]"]

    def _drawn(self, node: Any) -> list[str]:
        """The text in a frame or a shape."""
        before, self._below = self._below, []
        found = list(self._blocks(node, OdfLook()))
        found, self._below = [*found, *self._below], before
        return found

    def _described(self, node: Any) -> Iterator[str]:
        if node.tag == f"{DRAW}frame":
            text = one_line(node.findtext(f"{SVG}desc") or node.findtext(f"{SVG}title") or "")
            if text:
                yield f"[Image: {text}]"
            elif node.find(f"{DRAW}object") is not None or node.find(f"{DRAW}object-ole") is not None:
                self._left_out["embedded objects"] += 1

    # lists

    def _list(self, node: Any, look: OdfLook) -> Iterator[str]:
        lines: list[str] = []
        below: list[str] = []
        self._items(node, look, None, 1, lines, below)
        if lines:
            yield "\n".join(lines)
        yield from below

    def _items(
        self, node: Any, look: OdfLook, style: Any | None, level: int, lines: list[str], below: list[str]
    ) -> None:
        first = node.find(f".//{TEXT}p")
        named = node.get(f"{TEXT}style-name")
        own = self._styles.list_style(named, first.get(f"{TEXT}style-name") if first is not None else None)
        style = own if own is not None else style
        goes_on = node.get(f"{TEXT}continue-numbering") == "true" or node.get(f"{TEXT}continue-list")
        if level == 1 and not goes_on:
            self._numbers.pop(id(style), None)
        numbers = self._numbers.setdefault(id(style), Numbers())
        for item in node:
            if not isinstance(item.tag, str):
                continue
            numbered = item.tag == f"{TEXT}list-item"
            for child in item:
                if child.tag == f"{TEXT}list":
                    self._items(child, look, style, level + 1, lines, below)
                elif child.tag in _PARAGRAPHS:
                    mark = numbers.next(style, level, item.get(f"{TEXT}start-value")) if numbered else ""
                    numbered = False
                    text, *more = [*self._paragraph(child, look)] or [""]
                    heading = text.startswith("#")
                    if text:
                        lines.append(text if heading else f"{'  ' * (level - 1)}{mark} {text}".rstrip())
                    below += more
                elif isinstance(child.tag, str):
                    below += self._blocks([child], look)

    # tables

    def _table(self, node: Any) -> str:
        return markdown_table(self._cell_texts(node))

    def _cell_texts(self, node: Any) -> list[list[str]]:
        """The texts of a table's cells; a merged one has its text in the first of its places."""
        rows = []
        for row, _ in self._rows(node):
            texts: list[str] = []
            for cell, times in _cells(row):
                covered = cell.tag == f"{TABLE}covered-table-cell"
                texts += ["" if covered else self._cell(cell)] * min(times, _MOST_REPEATS)
            rows.append(texts)
        width = max(map(len, rows), default=0)
        return [texts + [""] * (width - len(texts)) for texts in rows]

    def _cell(self, cell: Any) -> str:
        """A cell's text; a table in it is ``a, b; c, d``."""
        parts = []
        for node in cell:
            if node.tag == f"{TABLE}table":
                rows = (", ".join(filter(None, row)) for row in self._cell_texts(node))
                parts.append("; ".join(filter(None, rows)))
            elif isinstance(node.tag, str):
                parts += self._drawn([node])
        return " ".join(filter(None, parts))

    def _rows(self, node: Any) -> Iterator[tuple[Any, int]]:
        """Yield the rows of a table that are seen, with how often each stands there."""
        for row in node.iter(f"{TABLE}table-row"):
            if next(row.iterancestors(f"{TABLE}table")) is not node:
                continue
            times = as_int(row.get(f"{TABLE}number-rows-repeated"), 1)
            if row.get(f"{TABLE}visibility") in ("collapse", "filter") and not self._take_hidden:
                if "".join(row.itertext()).strip():
                    self._left_out["hidden rows"] += times
                continue
            yield row, times

    def _sheet(self, node: Any) -> str:
        """The sheet's regions below its name, parted by blank rows."""
        name = one_line(node.get(f"{TABLE}name") or "")
        style = self._styles.properties("table", node.get(f"{TABLE}style-name"))
        if style.get("display") == "false" and not self._take_hidden:
            self._left_out["hidden sheets"] += 1
            return ""
        hidden = self._hidden_columns(node)
        regions: list[list[dict[int, str]]] = [[]]
        n_cells = 0
        for row, times in self._rows(node):
            cells: dict[int, str] = {}
            column = 0
            for cell, wide in _cells(row):
                text = self._cell(cell)
                if text and column not in hidden:
                    for at in range(column, column + min(wide, _MOST_REPEATS)):
                        cells[at] = text
                elif text:
                    self._left_out["cells of hidden columns"] += 1
                column += wide
            if not cells:
                if regions[-1]:
                    regions.append([])
                continue
            for _ in range(min(times, _MOST_REPEATS)):
                regions[-1].append(cells)
                n_cells += len(cells)
            if n_cells > _MOST_CELLS:
                self._left_out[f"cells beyond the first {_MOST_CELLS:,}"] += 1
                break
        texts = [*filter(None, map(_region, regions)), *self._below]
        self._below = []
        return "\n\n".join([f"# {name}", *texts]) if texts else ""

    def _hidden_columns(self, node: Any) -> set[int]:
        found: set[int] = set()
        at = 0
        for column in node.iter(f"{TABLE}table-column"):
            if at > _MOST_COLUMNS:
                break
            times = min(as_int(column.get(f"{TABLE}number-columns-repeated"), 1), _MOST_COLUMNS)
            if column.get(f"{TABLE}visibility") in ("collapse", "filter") and not self._take_hidden:
                found.update(range(at, at + times))
            at += times
        return found

    # slides

    def _slide(self, page: Any) -> str:
        style = self._styles.properties("drawing-page", page.get(f"{DRAW}style-name"))
        if style.get("visibility") == "hidden" and not self._take_hidden:
            self._left_out["hidden slides"] += 1
            return ""
        blocks: list[str] = []
        for node in page:
            if not isinstance(node.tag, str):
                continue
            if node.tag == f"{PRESENTATION}notes":
                said = " ".join(one_line(text) for text in self._drawn(node))
                blocks += [f"Notes: {said}"] if said else []
            else:
                text = self._drawn([node])
                if node.get(f"{PRESENTATION}class") == "title" and text:
                    text[0] = f"# {one_line(text[0])}"
                if node.get(f"{PRESENTATION}class") in ("footer", "header", "date-time"):
                    text = [each for each in text if each not in self._said]
                    self._said.update(text)
                blocks += text
        return "\n\n".join(blocks)

    def _furniture(self) -> Iterator[str]:
        """Headers and footers once, without page numbers."""
        found: dict[str, None] = {}
        for kind in ("header", "footer"):
            for node in self._masters.iter(f"{STYLE}{kind}") if self._masters is not None else ():
                for text in self._drawn(node):
                    if not is_page_number(text):
                        found[f"{kind.title()}: {one_line(text)}"] = None
        yield from found


def _collapsed(text: str) -> str:
    """White space as ODF has it: runs are one blank; more are ``text:s``."""
    inner = " ".join(text.split())
    if not inner:
        return " "
    return f"{' ' if text[0].isspace() else ''}{inner}{' ' if text[-1].isspace() else ''}"


def _cells(row: Any) -> Iterator[tuple[Any, int]]:
    """Yield the cells of a row, also those that a merged one covers, with how often each stands there."""
    for cell in row:
        if cell.tag in (f"{TABLE}table-cell", f"{TABLE}covered-table-cell"):
            yield cell, max(1, as_int(cell.get(f"{TABLE}number-columns-repeated"), 1))


def _region(rows: list[dict[int, str]]) -> str:
    """The region's table, below the titles in front of it: rows of one cell."""
    titles = next((at for at, row in enumerate(rows) if len(row) > 1), len(rows))
    lines = [text for row in rows[:titles] for text in row.values()]
    columns = sorted(set().union(*rows[titles:])) if rows[titles:] else []
    table = markdown_table([row.get(column, "") for column in columns] for row in rows[titles:])
    return "\n\n".join(filter(None, [*lines, table]))
