"""Rich Text Format: text by striprtf, with what it leaves out marked by `rtf_marks`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import (
    Parsed,
    Raw,
    left_out,
    one_line,
    unreadable,
    without_controls,
)
from ragserve.ingest.parsers.ooxml import is_page_number
from ragserve.ingest.parsers.rtf_marks import (
    CELL,
    COMMENT,
    END,
    FOOTER,
    HEADER,
    HEADING,
    LEVEL,
    LOWERED,
    NOTE,
    RAISED,
    ROW,
    STRUCK,
    TABLE,
    Marked,
)
from ragserve.ingest.parsers.small_text import lowered, raised_behind, struck

MIME = "application/rtf"
_TITLE = re.compile(r"\{\\title ([^{}]{1,2000})\}")
_CODE_PAGE = re.compile(r"\\ansicpg\d{1,5}")
_LOOKS = re.compile(f"([{RAISED}{LOWERED}{LEVEL}{STRUCK}])")
_STRUCTURE = re.compile(f"([{NOTE}{COMMENT}{HEADER}{FOOTER}{END}{CELL}{ROW}{TABLE}\n])")
_MARKS = re.compile(f"[{NOTE}-{HEADING}]")
_ENCAPSULATED = "\\fromhtml1"


def parse(raw: Raw) -> Parsed:
    source = raw.data.decode("latin-1")
    marked = Marked(source, hidden=raw.hidden)
    text = _plain(marked.source)
    found = _TITLE.search(source[:100_000])
    page = _CODE_PAGE.search(source[:10_000])
    title = _plain(f"{{\\rtf1{page.group() if page else ''} {found[1]}}}") if found else ""
    reading = _RichText(raw.comments)
    blocks = reading.blocks(text)
    note = left_out(
        {
            "hidden passages": marked.n_hidden,
            "comments": reading.n_comments,
            "embedded objects": marked.n_objects,
        }
    )
    shown = without_controls("\n\n".join(blocks))
    return Parsed(shown, MIME, one_line(_MARKS.sub("", title)), note=note)


def _plain(source: str) -> str:
    from striprtf.striprtf import rtf_to_text

    try:
        text = rtf_to_text(source, errors="replace")
    except (ValueError, TypeError, OverflowError) as error:  # numbers that are none
        raise unreadable("corrupt", f"not readable as RTF ({error})") from error
    # characters beyond the first plane are written as two halves
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _RichText:
    """Lays out what stands aside, tables and looks. ``n_comments`` are left out."""

    def __init__(self, comments: bool) -> None:
        self.n_comments = 0
        self._take_comments = comments
        self._n_notes = 0

    def blocks(self, text: str) -> list[str]:
        """The paragraphs and tables of a text; headers and footers are in front, once each."""
        furniture: dict[str, None] = {}
        blocks: list[str] = []
        line = ""
        below: list[str] = []
        rows: list[list[str]] | None = None
        cells: list[str] = []
        asides: list[tuple[str, str]] = []  # what is open, and the line that it stands in

        def end_line() -> None:
            nonlocal line
            if shown := _shown(line):
                blocks.append(shown)
            blocks.extend(below)
            below.clear()
            line = ""

        def end_table() -> None:
            nonlocal rows
            if rows:
                width = max(map(len, rows))
                blocks.append(markdown_table([row + [""] * (width - len(row)) for row in rows]))
                blocks.extend(below)
                below.clear()
            rows = None

        in_row = False
        for piece in _STRUCTURE.split(text):
            if piece in (NOTE, COMMENT, HEADER, FOOTER):
                asides.append((piece, line))
                line = ""
            elif piece == END and asides:
                kind, before = asides.pop()
                line = before + self._aside(kind, line, below, furniture)
            elif asides:
                line += " " if piece == "\n" else piece
            elif piece == TABLE:
                if line.strip():
                    end_line()
                rows, in_row, cells, line = rows or [], True, [], ""
            elif piece == CELL and in_row:
                cells.append(one_line(_shown(line)).removesuffix(","))
                line = ""
            elif piece == ROW and in_row:
                rows = rows or []
                rows.append(cells)
                in_row, line = False, ""
            elif piece == "\n" and in_row:
                line += " "
            elif piece == "\n":
                if line.strip():
                    end_table()
                end_line()
            elif piece and piece not in (CELL, ROW, END):
                if not in_row and rows is not None and piece.strip():
                    end_table()
                line += piece
        if in_row and cells:
            rows = [*(rows or []), cells]
        end_table()
        end_line()
        return [*furniture, *_listed(blocks)]

    def _aside(self, kind: str, said: str, below: list[str], furniture: dict[str, None]) -> str:
        text = one_line(_shown(said))
        if kind == NOTE:
            self._n_notes += 1
            below.append(f"[{self._n_notes}] {text}")
            return f"{LEVEL}[{self._n_notes}]"
        if kind == COMMENT and text:
            if self._take_comments:
                below.append(f"[Comment: {text}]")
            else:
                self.n_comments += 1
        elif text and not is_page_number(text):
            furniture[f"{'Header' if kind == HEADER else 'Footer'}: {text}"] = None
        return ""


def _shown(line: str) -> str:
    """A line with marks of raised, lowered and struck-out text as other formats have them."""
    found, look = "", LEVEL
    level = ""
    for piece in _LOOKS.split(line):
        if _LOOKS.fullmatch(piece):
            look = piece
            continue
        if HEADING in piece:
            before, _, behind = piece.partition(HEADING)
            level, piece = behind[:1], before + behind[1:]
        if look == RAISED:
            piece = raised_behind(found, piece)
        elif look == LOWERED:
            piece = lowered(piece)
        elif look == STRUCK:
            piece = struck(piece)
        found += piece
    text = _MARKS.sub("", found).strip()
    return f"{'#' * min(int(level) + 1, 6)} {one_line(text)}" if text and level.isdigit() else text


_BULLETS = "-•·o*\uf000-\uf0ff"  # also those of symbol fonts
_ITEM = re.compile(rf"(?:([{_BULLETS}])|\(?\w{{1,4}}[.)])\t\s*")


def _listed(blocks: list[str]) -> Iterator[str]:
    """The blocks, items of one list as lines of one block."""
    items: list[str] = []
    for block in [*blocks, ""]:
        found = _ITEM.match(block)
        if found:
            items.append(f"{'-' if found[1] else found.group().strip()} {block[found.end() :]}")
            continue
        if items:
            yield "\n".join(items)
            items = []
        if block:
            yield block
