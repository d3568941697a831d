"""PowerPoint files: a page per slide, with its tables, charts and grouped shapes, notes and comments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

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
from ragserve.ingest.parsers.ooxml import Package, Relation, as_int, is_on, relation_id
from ragserve.ingest.parsers.ooxml_charts import linked_text
from ragserve.ingest.parsers.pptx_text import A, body_text

MIME = "application/vnd.openxmlformats-officedocument.presentationml.presentation"

_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_CHOICE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_CHART = "{http://schemas.openxmlformats.org/drawingml/2006/chart}chart"
_CHART_EX = "{http://schemas.microsoft.com/office/drawing/2014/chartex}chart"
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_MODERN = "{http://schemas.microsoft.com/office/powerpoint/2018/8/main}"
_SHAPES = frozenset(f"{_P}{name}" for name in ("sp", "grpSp", "graphicFrame", "pic", "cxnSp", "contentPart"))
_TITLES = ("title", "ctrTitle")
_MARGINS = ("ftr", "hdr", "dt")  # placeholders that stand on every slide


def parse(raw: Raw) -> Parsed:
    with container_errors("a PowerPoint file"):
        return _Deck(raw).parsed()


class _Deck:
    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._package = package = Package(raw.data)
        self._part = package.main_part("pptx")
        self._deck = package.xml(self._part)
        self._left_out: Counter[str] = Counter()
        self._margins: set[str] = set()
        size = self._deck.find(f"{_P}sldSz")
        self._size = (as_int(size.get("cx")), as_int(size.get("cy"))) if size is not None else (0, 0)
        self._authors = self._read_authors()

    def parsed(self) -> Parsed:
        if self._deck.tag != f"{_P}presentation":
            raise KeyError("there is no presentation")
        ids = [relation_id(node) for node in self._deck.iter(f"{_P}sldId")]
        pages = [self._slide(self._package.relation(self._part, each)) for each in ids]
        title = self._package.title() or _first_heading(pages)
        note = joined_notes(self._package.damage(), left_out(self._left_out))
        return paged(pages, MIME, "slide", title=title, note=note)

    def _slide(self, relation: Relation | None) -> str:
        """The slide's text; empty for a hidden slide, which keeps its number."""
        part = "" if relation is None else relation.target
        root = self._package.optional_xml(part)
        if root is None:
            self._left_out["slides that are missing or unreadable"] += 1
            return ""
        if not is_on(root.get("show")) and not self._raw.hidden:
            self._left_out["hidden slides"] += 1
            return ""
        tree = root.find(f"{_P}cSld/{_P}spTree")
        shapes = list(self._shapes(tree)) if tree is not None else []
        title = next((shape for shape in shapes if _placeholder(shape) in _TITLES), None)
        heading = one_line(_shape_text(title)) if title is not None else ""
        parts = [f"# {heading}" if heading else ""]
        parts += [self._text(shape, part) for shape in shapes if shape is not title or not heading]
        parts += [*self._notes(part), *self._comments(part)]
        return "\n\n".join(filter(None, parts))

    def _shapes(self, tree: Any) -> Iterator[Any]:
        """Yield the shapes in their order, those of groups in place of the group, without hidden ones."""
        stack = list(reversed(tree))
        while stack:
            node = stack.pop()
            if node.tag == f"{_CHOICE}AlternateContent":
                chosen = node.find(f"{_CHOICE}Choice")
                chosen = node.find(f"{_CHOICE}Fallback") if chosen is None else chosen
                stack.extend(reversed(chosen if chosen is not None else ()))
            elif node.tag in _SHAPES:
                named = _properties(node)
                hidden = named is not None and is_on(named.get("hidden") or "0")
                if hidden and not self._raw.hidden:
                    self._left_out["hidden shapes"] += 1
                elif self._is_beside(node) and not self._raw.hidden:
                    self._left_out["shapes beside their slide"] += 1
                elif node.tag == f"{_P}grpSp":
                    stack.extend(reversed(node))
                else:
                    yield node

    def _is_beside(self, shape: Any) -> bool:
        """Whether nothing of a shape is on the slide. Shapes of a group have coordinates of their own."""
        parent = shape.getparent()
        place = (
            shape.find(f"{_P}spPr/{A}xfrm") if parent is not None and parent.tag == f"{_P}spTree" else None
        )
        at, size = (None, None) if place is None else (place.find(f"{A}off"), place.find(f"{A}ext"))
        if at is None or size is None or not all(self._size):
            return False
        places = zip((at.get("x"), at.get("y")), (size.get("cx"), size.get("cy")), self._size, strict=True)
        return any(as_int(start) + as_int(n) <= 0 or as_int(start) >= end for start, n, end in places)

    def _text(self, shape: Any, part: str) -> str:
        kind = _placeholder(shape)
        if kind == "sldNum":
            return ""
        texts = [*map(_table, shape.iter(f"{A}tbl")), *self._drawn(shape, part)]
        if shape.tag in (f"{_P}sp", f"{_P}cxnSp"):
            texts.append(_shape_text(shape))
        named = _properties(shape)
        if named is not None and shape.tag != f"{_P}sp" and (described := one_line(named.get("descr") or "")):
            texts.append(f"[Image: {described}]")
        text = "\n\n".join(filter(None, texts))
        if kind in _MARGINS:
            if text in self._margins:
                return ""
            self._margins.add(text)
        return text

    def _drawn(self, shape: Any, part: str) -> Iterator[str]:
        """Yield the texts of charts and diagrams."""
        ids = [relation_id(node) for node in shape.iter(_CHART, _CHART_EX)]
        ids += [relation_id(node, "dm") for node in shape.iter(_DIAGRAM)]
        for each in ids:
            if relation := self._package.relation(part, each):
                yield linked_text(self._package, relation.kind, relation.target)

    def _notes(self, part: str) -> Iterator[str]:
        for root in self._package.roots(part, "notesSlide"):
            for shape in root.iter(f"{_P}sp"):
                if _placeholder(shape) == "body" and (text := _shape_text(shape)):
                    yield f"Notes: {text}"

    def _comments(self, part: str) -> Iterator[str]:
        for root in self._package.roots(part, "comments"):
            for node in root.iter(f"{_P}cm", f"{_MODERN}cm", f"{_MODERN}reply"):
                body = node.find(f"{_MODERN}txBody")
                text = one_line(node.findtext(f"{_P}text") or (body_text(body) if body is not None else ""))
                if not self._raw.comments:
                    self._left_out["comments"] += 1
                elif text:
                    author = self._authors.get(node.get("authorId") or "", "")
                    yield f"[Comment{f' by {author}' if author else ''}: {text}]"

    def _read_authors(self) -> dict[str, str]:
        found = {}
        for kind in ("commentAuthors", "authors"):
            for root in self._package.roots(self._part, kind):
                for node in root:
                    found[node.get("id") or ""] = one_line(node.get("name") or "")
        return found


def _properties(shape: Any) -> Any | None:
    """The element with a shape's name, description and switch."""
    return next((node for part in shape for node in part.iterchildren(f"{_P}cNvPr")), None)


def _placeholder(shape: Any) -> str:
    """The kind of a placeholder; empty for other shapes."""
    node = next((node for part in shape for node in part.iter(f"{_P}ph")), None)
    return "" if node is None else node.get("type") or "body"


def _shape_text(shape: Any) -> str:
    body = shape.find(f"{_P}txBody")
    return "" if body is None else body_text(body)


def _table(table: Any) -> str:
    """A table whose merged cells have their text in the first of them."""
    rows = []
    for row in table.iterchildren(f"{A}tr"):
        cells = []
        for cell in row.iterchildren(f"{A}tc"):
            body = cell.find(f"{A}txBody")
            merged = is_on(cell.get("hMerge") or "0") or is_on(cell.get("vMerge") or "0")
            cells.append("" if merged or body is None else body_text(body))
        rows.append(cells)
    return markdown_table(rows)


def _first_heading(pages: list[str]) -> str:
    return next((page.split("\n", 1)[0][2:] for page in pages if page.startswith("# ")), "")
