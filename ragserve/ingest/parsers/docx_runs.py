"""The text of a paragraph of a Word document: runs, fields, symbols and equations in reading order."""

from __future__ import annotations

from typing import Any

from ragserve.ingest.parsers.base import one_line
from ragserve.ingest.parsers.docx_styles import VAL, Look, Styles, W, look_of
from ragserve.ingest.parsers.list_numbers import symbol
from ragserve.ingest.parsers.office_math import MATH, math_text
from ragserve.ingest.parsers.ooxml import as_int, is_on, relation_id
from ragserve.ingest.parsers.small_text import Run, joined_runs

_CHOICE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_CHART = "{http://schemas.openxmlformats.org/drawingml/2006/chart}chart"
_CHART_EX = "{http://schemas.microsoft.com/office/drawing/2014/chartex}chart"
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_PICTURE = "{http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing}docPr"
_ART = "{urn:schemas-microsoft-com:vml}textpath"  # words drawn as a shape, such as a watermark
_SKIPPED = frozenset(
    f"{W}{name}" for name in ("del", "moveFrom", "pPr", "rPr", "sdtPr", "instrText", "delText")
)
_PLAIN = {f"{W}tab": "\t", f"{W}br": "\n", f"{W}cr": "\n", f"{W}noBreakHyphen": "-", f"{W}ptab": "\t"}
_NOTES = {f"{W}{kind}Reference": kind for kind in ("footnote", "endnote", "comment")}
_PAGE_FIELDS = (["PAGE"], ["NUMPAGES"], ["SECTIONPAGES"])  # first words of their codes


class Inline:
    """Reads a paragraph. Notes stand in its text as ``\\0kind id\\0``, for their numbers to be put in.

    ``references`` are the notes, with their ids and the marks that they have of their own; ``boxes`` are text
    boxes, ``drawn`` the relations of charts, ``images`` descriptions. ``hidden`` and ``unknown`` count runs
    and symbols that were left out.
    """

    def __init__(self, styles: Styles, paragraph: Any, *, hidden: bool, boxed: bool) -> None:
        self.references: list[tuple[str, tuple[str, str]]] = []
        self.boxes: list[Any] = []
        self.drawn: list[str] = []
        self.images: list[str] = []
        self.hidden = 0
        self.unknown = 0
        self.deleted_mark = paragraph.find(f"{W}pPr/{W}rPr/{W}del") is not None
        self._styles, self._take_hidden, self._boxed = styles, hidden, boxed
        properties = paragraph.find(f"{W}pPr")
        self._look = styles.look(styles.of(paragraph)).under(look_of(None, properties))
        self._runs: list[Run] = []
        self._fields: list[list[Any]] = []  # code of each open field, and whether its result has begun
        self._read(paragraph, self._look)

    def text(self) -> str:
        """The text, with marks of raised, lowered and struck-out characters."""
        return joined_runs(self._runs).strip()

    def _read(self, top: Any, look: Look) -> None:
        stack: list[tuple[Any, Look]] = [(child, look) for child in reversed(top)]
        while stack:
            node, look = stack.pop()
            if not isinstance(node.tag, str) or node.tag in _SKIPPED:
                if node.tag == f"{W}instrText" and self._fields:
                    self._fields[-1][0] += node.text or ""
                continue
            if node.tag == f"{W}r":
                look = self._look_of(node)
            if self._is_mark(node, look):
                continue
            if node.tag == f"{_CHOICE}AlternateContent":
                chosen = node.find(f"{_CHOICE}Choice")
                chosen = node.find(f"{_CHOICE}Fallback") if chosen is None else chosen
                children = [] if chosen is None else list(chosen)
            elif node.tag == f"{W}txbxContent":
                self.boxes.append(node)
                continue
            elif node.tag == f"{W}ruby":
                self._ruby(node, look)
                continue
            else:
                children = list(node)
            stack += [(child, look) for child in reversed(children)]

    def _is_mark(self, node: Any, look: Look) -> bool:
        """Read what is text itself; False for what only holds some."""
        tag = node.tag
        if tag == f"{W}t":
            self._add(self._in_font(node.text or "", look), look)
        elif tag in _PLAIN:
            self._add(_PLAIN[tag], look)
        elif tag == f"{W}sym":
            self._symbol(node.get(f"{W}font") or "", as_int(node.get(f"{W}char"), base=16), look)
        elif tag in (f"{MATH}oMath", f"{MATH}oMathPara"):
            self._add(math_text(node), look._replace(place=0))
        elif tag == f"{W}fldChar":
            self._field(node, look)
        elif tag in _NOTES:
            self._note(node, _NOTES[tag], look)
        elif tag in (_CHART, _CHART_EX):
            self.drawn.append(relation_id(node))
        elif tag == _DIAGRAM:
            self.drawn.append(relation_id(node, "dm"))
        elif tag == _ART:
            self._add(node.get("string") or "", look)
        elif tag == _PICTURE and (text := one_line(node.get("descr") or "")):
            self.images.append(text)
        else:
            return False
        return True

    def _look_of(self, run: Any) -> Look:
        properties = run.find(f"{W}rPr")
        if properties is None:
            return self._look
        style = properties.find(f"{W}rStyle")
        look = self._look if style is None else self._look.under(self._styles.look(style.get(VAL)))
        return look.under(look_of(properties))

    def _is_unseen(self, look: Look) -> bool:
        white = look.white and not look.shaded and not self._boxed
        return bool(look.hidden or look.tiny or white) and not self._take_hidden

    def _add(self, text: str, look: Look) -> None:
        if not text or any(not begun or code.split()[:1] in _PAGE_FIELDS for code, begun in self._fields):
            return
        if self._is_unseen(look):
            self.hidden += bool(text.strip())
            return
        self._runs.append(Run(text, look.place or 0, bool(look.struck)))

    def _in_font(self, text: str, look: Look) -> str:
        """Text in a symbol font as what it shows."""
        font = (look.font or "").lower()
        if not font.startswith(("symbol", "wingdings", "webdings")):
            return text
        shown = ((letter, symbol(font, ord(letter))) for letter in text)
        return "".join(letter if sign is None else sign for letter, sign in shown)

    def _symbol(self, font: str, code: int, look: Look) -> None:
        sign = symbol(font, code)
        if sign is None:
            self.unknown += 1
        else:
            self._add(sign, look)

    def _field(self, node: Any, look: Look) -> None:
        kind = node.get(f"{W}fldCharType")
        if kind == "begin":
            box = node.find(f"{W}ffData/{W}checkBox")
            choices = node.find(f"{W}ffData/{W}ddList")
            if box is not None:
                state = box.find(f"{W}checked")
                state = box.find(f"{W}default") if state is None else state
                self._add("☒" if state is not None and is_on(state.get(VAL)) else "☐", look)
            elif choices is not None:
                entries = [entry.get(VAL) or "" for entry in choices.iterchildren(f"{W}listEntry")]
                chosen = choices.find(f"{W}result")
                place = as_int(chosen.get(VAL)) if chosen is not None else 0
                self._add(entries[place] if 0 <= place < len(entries) else "", look)
            self._fields.append(["", False])
        elif kind == "separate" and self._fields:
            self._fields[-1][1] = True
        elif kind == "end" and self._fields:
            self._fields.pop()

    def _note(self, node: Any, kind: str, look: Look) -> None:
        if self._is_unseen(look):
            return
        number, mark = node.get(f"{W}id") or "", ""
        if is_on(node.get(f"{W}customMarkFollows") or "0"):
            following = node.getnext()
            if following is not None and following.tag == f"{W}t":
                mark, following.text = following.text or "", ""
        self.references.append((kind, (number, mark)))
        self._add(f"\0{kind} {number}\0", look._replace(place=0))

    def _ruby(self, node: Any, look: Look) -> None:
        base, reading = node.find(f"{W}rubyBase"), node.find(f"{W}rt")
        if base is not None:
            self._read(base, look)
        if reading is not None:
            self._add(f"({one_line(''.join(t.text or '' for t in reading.iter(f'{W}t')))})", look)
