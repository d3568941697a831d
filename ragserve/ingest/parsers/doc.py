"""Word files of 1997 to 2003 (``.doc``), by office-oxide.

Compared on files that LibreOffice wrote: antiword and unword take hidden text for text, and lose tables or
lay them out by blanks; office-oxide gives paragraphs, tables, notes and looks. What it says of the numbers of
lists is not what a reader sees, so items have none here, and it has no text boxes; the report says so."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import (
    Parsed,
    Raw,
    left_out,
    one_line,
    unreadable,
    without_controls,
)
from ragserve.ingest.parsers.grid import Grid
from ragserve.ingest.parsers.ooxml import is_page_number
from ragserve.ingest.parsers.small_text import Run, joined_runs

MIME = "application/msword"
_PLACES = {"superscript": 1, "subscript": -1}
_MOST_LEVELS = 20
_WORD_97 = 193  # version of the head from which on it has these places
_BOXES = (0x25A, 0x26A)  # places in the head of the lists of text boxes: of the text, of headers ([MS-DOC])
_PLACE, _BOX = 4, 22  # bytes of a list's entries: n + 2 places and n + 1 boxes, of which the last is none

Node = Mapping[str, Any]


def parse(raw: Raw) -> Parsed:
    import office_oxide

    try:
        with office_oxide.Document.from_bytes(raw.data, "doc") as document:
            tree = document.to_ir()
    except office_oxide.OfficeOxideError as error:
        raise unreadable("corrupt", f"not readable as a Word file: {error} (save it as .docx)") from error
    return _OldWord(raw.comments, _text_boxes(raw.data)).parsed(tree)


def _text_boxes(data: bytes) -> int:
    """How many text boxes of a file say something, as far as that can be read."""
    import olefile

    n = 0
    try:
        with olefile.OleFileIO(data) as file:
            head = file.openstream("WordDocument").read(_BOXES[-1] + 8)
            table = file.openstream("1Table" if head[11] & 2 else "0Table").read()
        if struct.unpack_from("<H", head, 2)[0] < _WORD_97:
            return 0
        for place in _BOXES:
            start, size = struct.unpack_from("<2I", head, place)
            n_boxes = max(0, min(size, len(table)) - _PLACE) // (_PLACE + _BOX)
            places = struct.unpack_from(f"<{n_boxes}I", table, start)
            n += sum(end - begin > 1 for begin, end in pairwise(places))  # 1: the end of a paragraph
    except (OSError, struct.error, IndexError, ValueError):
        return n
    return n


class _OldWord:
    def __init__(self, comments: bool, n_boxes: int) -> None:
        self._take_comments = comments
        self._n_boxes = n_boxes
        self._n_comments = self._n_numbered = 0

    def parsed(self, tree: Node) -> Parsed:
        sections = tree.get("sections", ())
        blocks = list(self._furniture(sections))
        for section in sections:
            blocks += self._blocks(section.get("elements", ()))
        text = without_controls("\n\n".join(blocks))
        title = tree.get("metadata", {}).get("title") or ""
        title = title or next((block.lstrip("# ") for block in blocks if block.startswith("# ")), "")
        kinds = {
            "numbers of list items": self._n_numbered,
            "comments": self._n_comments,
            "text boxes": self._n_boxes,
        }
        return Parsed(text, MIME, one_line(title), note=left_out(kinds))

    def _furniture(self, sections: Sequence[Node]) -> Iterator[str]:
        """Headers and footers once, without page numbers."""
        found: dict[str, None] = {}
        for section in sections:
            for place in ("header", "footer"):
                shown = self._blocks((section.get(place) or {}).get("content", ()))
                text = one_line(" ".join(shown))
                if text and not is_page_number(text):
                    found[f"{place.title()}: {text}"] = None
        yield from found

    def _blocks(self, nodes: Sequence[Node]) -> Iterator[str]:
        for node in nodes:
            kind = node.get("type")
            if kind == "list":
                yield from filter(None, ["\n".join(self._items(node, 0))])
            elif kind == "table":
                yield self._table(node)
            elif kind in ("footnote", "endnote"):
                yield from self._note(node)
            elif kind == "heading":
                text = one_line(self._text(node))
                yield from [f"{'#' * max(1, min(int(node.get('level') or 1), 6))} {text}"] if text else []
            elif text := self._text(node):
                yield text

    def _text(self, node: Node) -> str:
        runs = [
            Run(
                str(part["text"]),
                _PLACES.get(str(part.get("vertical_align")), 0),
                bool(part.get("strikethrough")),
            )
            for part in node.get("content", ())
            if isinstance(part, Mapping) and part.get("text")
        ]
        return joined_runs(runs).strip()

    def _note(self, node: Node) -> Iterator[str]:
        text = one_line(" ".join(self._blocks(node.get("content", ()))))
        if node.get("marker") != "comment":
            yield from [f"[Note: {text}]"] if text else []
        elif not self._take_comments:
            self._n_comments += 1
        elif text:
            author = one_line(node.get("author") or "")
            yield f"[Comment{f' by {author}' if author else ''}: {text}]"

    def _items(self, node: Node, level: int) -> Iterator[str]:
        for item in node.get("items", ()):
            text = one_line(" ".join(self._blocks(item.get("content", ()))))
            if text:
                self._n_numbered += bool(node.get("ordered"))
                yield f"{'  ' * level}- {text}"
            if item.get("nested") and level < _MOST_LEVELS:
                yield from self._items(item["nested"], level + 1)

    def _table(self, node: Node) -> str:
        grid = Grid()
        for number, row in enumerate(node.get("rows", ())):
            for cell in row.get("cells", ()):
                text = one_line(" ".join(self._blocks(cell.get("content", ()))))
                grid.add(number, text, int(cell.get("row_span") or 1), int(cell.get("col_span") or 1))
        return markdown_table(grid.rows())
