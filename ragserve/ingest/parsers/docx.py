"""Word documents: paragraphs, headings, lists and tables in order, with the notes, boxes and charts beside
them, and without what no reader sees."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, container_errors, joined_notes, left_out, one_line
from ragserve.ingest.parsers.docx_runs import Inline
from ragserve.ingest.parsers.docx_styles import VAL, Numbering, Styles, W
from ragserve.ingest.parsers.grid import Grid
from ragserve.ingest.parsers.list_numbers import list_number
from ragserve.ingest.parsers.ooxml import Package, is_on, is_page_number, relation_id
from ragserve.ingest.parsers.ooxml_charts import linked_text

MIME = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"

_CHOICE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_AROUND = frozenset(f"{W}{name}" for name in ("sdt", "sdtContent", "customXml", "smartTag", "ins", "moveTo"))


def parse(raw: Raw) -> Parsed:
    with container_errors("a Word document"):
        return _Document(raw).parsed()


class _Document:
    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._package = package = Package(raw.data)
        self._part = package.main_part("docx")
        self._body = package.xml(self._part).find(f"{W}body")
        if self._body is None:
            raise KeyError("there is no body")
        self._styles = Styles(self._related_root("styles"))
        self._numbering = Numbering(self._related_root("numbering"), self._styles)
        self._notes = {kind: self._texts(f"{kind}s", kind) for kind in ("footnote", "endnote", "comment")}
        self._numbers: Counter[str] = Counter()  # of footnotes and endnotes
        self._left_out: Counter[str] = Counter()
        self._beside: list[str] = []  # follows the paragraph, or the table
        self._below: list[str] = []  # its notes
        root = self._body.getparent()
        self._shown_white = root.find(f"{W}background") is not None  # white letters may stand on a colour

    def parsed(self) -> Parsed:
        heads, feet = self._margins()
        blocks = [*heads, *filter(str.strip, self._blocks(self._body, self._part)), *feet]
        title = self._package.title()
        if not title:
            title = next((block.lstrip("# ") for block in blocks if block.startswith("# ")), "")
        return Parsed(
            "\n\n".join(blocks),
            MIME,
            title=title,
            note=joined_notes(self._package.damage(), left_out(self._left_out)),
        )

    def _related_root(self, kind: str) -> Any | None:
        return next(self._package.roots(self._part, kind), None)

    def _texts(self, kind: str, tag: str) -> dict[str, Any]:
        """The notes of a kind, by their ids."""
        root = self._related_root(kind)
        nodes = root.iterchildren(f"{W}{tag}") if root is not None else ()
        return {node.get(f"{W}id"): node for node in nodes}

    def _blocks(self, container: Any, part: str, *, cell: bool = False, boxed: bool = False) -> Iterator[str]:
        """Yield the texts of block-level children, also in content controls. In a ``cell`` all is plain text,
        and what belongs beside it follows the table."""
        for child in container.iterchildren():
            if child.tag == f"{W}p":
                yield self._paragraph(child, part, boxed=boxed or cell)
            elif child.tag == f"{W}tbl":
                yield from self._table(child, part, cell=cell)
            elif child.tag in _AROUND:
                yield from self._blocks(child, part, cell=cell, boxed=boxed)
            elif child.tag == f"{_CHOICE}AlternateContent":
                chosen = child.find(f"{_CHOICE}Choice")
                if chosen is not None:
                    yield from self._blocks(chosen, part, cell=cell, boxed=boxed)
            elif child.tag == f"{W}altChunk":
                self._left_out["embedded files"] += 1
            if not cell:
                yield from self._flushed()

    def _flushed(self) -> Iterator[str]:
        while self._beside or self._below:
            texts = self._beside + self._below
            self._beside, self._below = [], []
            yield from texts

    def _paragraph(self, node: Any, part: str, *, boxed: bool) -> str:
        inline = Inline(self._styles, node, hidden=self._raw.hidden, boxed=boxed or self._shown_white)
        text = inline.text()
        self._left_out["hidden pieces of text"] += inline.hidden
        self._left_out["symbols of unknown fonts"] += inline.unknown
        for kind, ids in inline.references:
            text = self._referred(kind, ids, text, part)
        for box in inline.boxes:
            texts = list(self._blocks(box, part, boxed=True))  # flushes what was beside until now
            self._beside += texts
        if inline.drawn:
            found = (self._package.relation(part, each) for each in inline.drawn)
            drawn = (linked_text(self._package, each.kind, each.target) for each in found if each is not None)
            self._beside += filter(None, drawn)
        self._beside += (f"[Image: {text}]" for text in inline.images)
        if not text and inline.deleted_mark:
            return ""
        label = self._numbering.label(node)
        level = 0 if boxed else self._styles.level(node)
        if not text:
            return ""
        return "#" * level + " " * bool(level) + (f"{label} {text}" if label else text)

    def _referred(self, kind: str, own_mark: tuple[str, str], text: str, part: str) -> str:
        """Put the note's number into the text, and the note below the paragraph."""
        number, mark = own_mark
        place = f"\0{kind} {number}\0"
        note = self._notes[kind].get(number)
        if note is None:
            return text.replace(place, "", 1)
        if kind == "comment":
            if not self._raw.comments:
                self._left_out["comments"] += 1
            else:
                author = one_line(note.get(f"{W}author") or "")
                by = f" by {author}" if author else ""
                self._below.append(f"[Comment{by}: {self._plain(note, part)}]")
            return text.replace(place, "", 1)
        if not mark:
            self._numbers[kind] += 1
            form = "lowerRoman" if kind == "endnote" else "decimal"
            mark = f"[{list_number(self._numbers[kind], form)}]"
        self._below.append(f"{mark} {self._plain(note, part)}")
        return text.replace(place, mark, 1)

    def _plain(self, container: Any, part: str) -> str:
        return one_line(" ".join(self._blocks(container, part, cell=True)))

    def _table(self, table: Any, part: str, *, cell: bool) -> Iterator[str]:
        rows = list(self._rows(table))
        one = len(rows) == 1 and (
            len(rows[0][1]) == 1 or any(c.find(f"{W}tbl") is not None for c in rows[0][1])
        )
        if one and not cell:  # a frame around text, or columns of a page
            for each in rows[0][1]:
                yield from self._blocks(each, part, boxed=True)
            return
        grid = Grid()
        for number, (row, cells) in enumerate(rows):
            if before := _number(row, "gridBefore"):
                grid.add(number, "", colspan=before)
            for each in cells:
                text = ""
                if not (number and _goes_on(each, "vMerge")) and not _goes_on(each, "hMerge"):
                    text = " ".join(filter(None, self._blocks(each, part, cell=True)))
                grid.add(number, text, colspan=_number(each, "gridSpan") or 1)
        if cell:
            lines = (", ".join(filter(None, row)) for row in grid.rows())
            yield "; ".join(filter(None, lines))
        else:
            yield markdown_table(grid.rows())

    def _rows(self, table: Any) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the rows that a reader sees, with their cells, also those of content controls."""
        for row in _within(table, f"{W}tr"):
            properties = row.find(f"{W}trPr")
            if properties is not None and properties.find(f"{W}del") is not None:
                continue
            hidden = None if properties is None else properties.find(f"{W}hidden")
            if hidden is not None and is_on(hidden.get(VAL)) and not self._raw.hidden:
                self._left_out["hidden rows"] += 1
                continue
            cells = _within(row, f"{W}tc")
            yield row, [each for each in cells if each.find(f"{W}tcPr/{W}cellDel") is None]

    def _margins(self) -> tuple[list[str], list[str]]:
        """Headers and footers, each text once, without the numbers of pages."""
        settings = self._related_root("settings")
        even = settings is not None and settings.find(f"{W}evenAndOddHeaders") is not None
        found: dict[str, list[str]] = {"header": [], "footer": []}
        for section in self._body.iter(f"{W}sectPr"):
            shown = {"default": True, "even": even, "first": section.find(f"{W}titlePg") is not None}
            for kind, texts in found.items():
                for reference in section.iterchildren(f"{W}{kind}Reference"):
                    found_at = self._package.relation(self._part, relation_id(reference))
                    if found_at is None or not shown.get(reference.get(f"{W}type")):
                        continue
                    root = self._package.optional_xml(found_at.target)
                    if root is not None:
                        texts += self._margin(root, found_at.target, kind.capitalize())
        return list(dict.fromkeys(found["header"])), list(dict.fromkeys(found["footer"]))

    def _margin(self, root: Any, part: str, name: str) -> Iterator[str]:
        for node in list(root.iter(f"{W}fldSimple")):
            if re.match(r"(PAGE|NUMPAGES|SECTIONPAGES)\b", (node.get(f"{W}instr") or "").lstrip()):
                node.clear()
        lines = [*self._blocks(root, part, cell=True), *self._flushed()]
        lines = [line for line in map(one_line, lines) if not is_page_number(line)]
        if lines:
            yield f"{name}: {' | '.join(lines)}"


def _goes_on(cell: Any, name: str) -> bool:
    """Whether a cell only goes on with the one above it, or on its left."""
    merge = cell.find(f"{W}tcPr/{W}{name}")
    return merge is not None and merge.get(VAL) in (None, "continue")


def _within(node: Any, tag: str) -> list[Any]:
    """Children of a kind, also those in content controls and insertions."""
    found = []
    for child in node.iterchildren():
        if child.tag == tag:
            found.append(child)
        elif child.tag in _AROUND:
            found += _within(child, tag)
    return found


def _number(node: Any, name: str) -> int:
    """A number of columns among the properties of a row or a cell; 0 if it is not given."""
    kind = "trPr" if node.tag == f"{W}tr" else "tcPr"
    found = node.find(f"{W}{kind}/{W}{name}")
    text = "" if found is None else found.get(VAL) or ""
    return int(text) if text.isdigit() else 0
