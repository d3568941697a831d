"""Word documents: paragraphs, headings and tables in order, with text that ``Paragraph.text`` omits."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import Parsed, Raw, container_errors

MIME = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


def parse(raw: Raw) -> Parsed:
    import docx
    from docx.opc.exceptions import PackageNotFoundError

    with container_errors("a Word document", PackageNotFoundError):
        document = docx.Document(BytesIO(raw.data))
        blocks = [block for block in _blocks(document.element.body, document) if block.strip()]
        title = (document.core_properties.title or "").strip()
    if not title:
        title = next((block.lstrip("# ") for block in blocks if block.startswith("# ")), "")
    return Parsed("\n\n".join(blocks), MIME, title=title)


def _blocks(container: Any, document: Any, *, in_cell: bool = False) -> Iterator[str]:
    """Yield the texts of block-level children, also in content controls (w:sdt), which python-docx skips. A
    table within a cell is plain text."""
    from docx.oxml.ns import qn

    for child in container.iterchildren():
        if child.tag == qn("w:p"):
            yield _heading_mark(child, document) + _inline_text(child)
        elif child.tag == qn("w:tbl"):
            rows = _rows(child, document)
            yield " ".join(map(" ".join, rows)) if in_cell else markdown_table(rows)
        elif child.tag == qn("w:sdt"):
            for content in child.iterchildren(qn("w:sdtContent")):
                yield from _blocks(content, document, in_cell=in_cell)


def _rows(table: Any, document: Any) -> Iterator[list[str]]:
    """Yield the texts of the cells of each row. A cell that spans columns is one element and appears once."""
    from docx.oxml.ns import qn

    for row in table.iterchildren(qn("w:tr")):
        yield [" ".join(_blocks(cell, document, in_cell=True)) for cell in row.iterchildren(qn("w:tc"))]


def _heading_mark(paragraph: Any, document: Any) -> str:
    from docx.text.paragraph import Paragraph

    style = Paragraph(paragraph, document._body).style
    name = (style.name or "") if style is not None else ""
    if name == "Title":
        return "# "
    level = name.removeprefix("Heading ")
    return "#" * int(level) + " " if name.startswith("Heading ") and level.isdigit() else ""


def _inline_text(paragraph: Any) -> str:
    """Text of runs, links, insertions and text boxes, without deletions and fallback copies of drawings."""
    from docx.oxml.ns import qn

    skipped = {
        qn("w:del"),
        qn("w:moveFrom"),
        "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",
    }
    plain = {qn("w:tab"): "\t", qn("w:br"): "\n", qn("w:cr"): "\n", qn("w:noBreakHyphen"): "-"}
    tabs = qn("w:tabs")  # tab stops, whose children are w:tab too
    parts: list[str] = []
    stack = list(reversed(paragraph))
    while stack:
        node = stack.pop()
        if node.tag in skipped or node.tag == tabs:
            continue
        if node.tag == qn("w:t"):
            parts.append(node.text or "")
        elif node.tag in plain:
            parts.append(plain[node.tag])
        else:
            if node.tag == qn("w:p") and parts:  # a paragraph within a text box
                parts.append("\n")
            stack.extend(reversed(node))
    return "".join(parts).strip()
