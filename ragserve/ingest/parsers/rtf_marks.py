"""What striprtf loses of an RTF file, as marks in its source that stay in the text that striprtf reads.

striprtf knows code pages, fonts' charsets, Unicode and destinations. It takes hidden and deleted text for
text, and leaves out footnotes, comments, headers, old lists' numbers, and where cells and raised text begin.
So the source is rewritten first: what is not seen goes, and a character of Unicode's private area stands for
each of the others."""

from __future__ import annotations

import re
from typing import NamedTuple

NOTE, COMMENT, HEADER, FOOTER, END = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
"""What stands aside begins with one of the first four, and ends with the last."""
CELL, ROW, TABLE = "\ue005", "\ue006", "\ue007"
"""The ends of a cell and of a row, and the beginning of a row."""
RAISED, LOWERED, LEVEL, STRUCK, HEADING = "\ue008", "\ue009", "\ue00a", "\ue00b", "\ue00c"
"""The looks of the text behind them; LEVEL: of none. A level's digit is behind HEADING."""

_TOKEN = re.compile(
    r"\\([a-zA-Z]{1,32})(-?\d{1,10})? ?|\\('[0-9a-fA-F]{2})|\\([^a-zA-Z])|([{}])|[\r\n]+|[^\\{}\r\n]+|\\",
    re.S,
)
_STYLE = re.compile(r"\{\\s(\d{1,5})\b([^{}]{0,2000})")
_LEVEL = re.compile(r"\\outlinelevel(\d)")
_STYLES = 1_000_000  # characters at the beginning that have the styles
_ASIDE = {
    "footnote": NOTE,
    "annotation": COMMENT,
    **dict.fromkeys(("header", "headerl", "headerr", "headerf"), HEADER),
    **dict.fromkeys(("footer", "footerl", "footerr", "footerf"), FOOTER),
}
_DROPPED = frozenset(
    [
        *("pict", "objdata", "fldinst", "nonesttables", "listpicture", "datastore", "themedata", "blipuid"),
        *("shppict", "nonshppict", "htmltag", "bkmkstart", "bkmkend", "generator", "stylesheet", "listtable"),
    ]
)
_PARAGRAPHS = ("par", "line", "tab", "sect", "page", "u", "emdash", "endash", "bullet")
_QUOTES = ("lquote", "rquote", "ldblquote", "rdblquote", "emspace", "enspace", "qmspace")
_TEXT_WORDS = frozenset(_PARAGRAPHS + _QUOTES)
_SYMBOLS = frozenset("~-_\\{}")
_SWITCHES = {
    "v": "hidden",
    "deleted": "deleted",
    "strike": "struck",
    "striked": "struck",
    "htmlrtf": "deleted",
}


class _State(NamedTuple):
    hidden: bool = False
    deleted: bool = False
    struck: bool = False
    place: int = 0
    heading: int = -1
    in_table: bool = False
    end: str = ""  # of what begins with this group

    @property
    def look(self) -> str:
        if self.struck:
            return STRUCK
        return RAISED if self.place > 0 else LOWERED if self.place < 0 else LEVEL


class Marked:
    """``source`` is the rewritten text; ``n_hidden`` counts the hidden passages that are left out, and
    ``n_objects`` embedded objects."""

    def __init__(self, text: str, *, hidden: bool) -> None:
        self.n_hidden = self.n_objects = 0
        self._take_hidden = hidden
        self._out: list[str] = []
        self._state = _State()
        self._stack: list[_State] = []
        self._look = LEVEL
        self._in_row = self._said_heading = self._skipping = False
        self._dropped = 0  # depth of the group that is left out
        self._headings = {
            style[1]: int(level[1])
            for style in _STYLE.finditer(text, 0, _STYLES)
            if (level := _LEVEL.search(style[2]))
        }
        self._read(text)
        self.source = "".join(self._out)

    def _read(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                break
            at = found.end()
            word, number, code, symbol, brace = found.groups()
            if brace == "{":
                self._stack.append(self._state)
                self._state = self._state._replace(end="")
                self._emit(brace)
            elif brace == "}":
                self._close()
            elif word == "bin":
                at += max(0, int(number or 0))
            elif self._dropped:
                continue
            elif word:
                self._word(word, number, found.group())
            elif code or (symbol and symbol in _SYMBOLS) or found.group()[0] not in "\\\r\n":
                self._text(found.group())
            else:
                self._emit(found.group())

    def _close(self) -> None:
        if self._state.end and not self._dropped:
            self._emit(self._state.end)
            self._look = LEVEL
        self._emit("}")
        if self._dropped > len(self._stack) - 1:
            self._dropped = 0
            self._out.append("}")
        self._state = self._stack.pop() if self._stack else _State()

    def _emit(self, token: str) -> None:
        if not self._dropped:
            self._out.append(token)

    def _word(self, word: str, number: str | None, token: str) -> None:
        state, on = self._state, number != "0"
        if word in _DROPPED:
            if word == "objdata":
                self.n_objects += 1
            self._dropped = len(self._stack)
        elif word in _ASIDE:
            self._aside(_ASIDE[word])
        elif word == "pntext":
            pass  # striprtf leaves out the numbers that it holds
        elif word in _SWITCHES:
            self._state = self._switched(_SWITCHES[word], on)
        elif word in ("super", "up"):
            self._state = state._replace(place=int(on))
        elif word in ("sub", "dn"):
            self._state = state._replace(place=-int(on))
        elif word == "nosupersub":
            self._state = state._replace(place=0)
        elif word == "plain":
            self._state = state._replace(hidden=False, struck=False, place=0)
            self._emit(token)
        elif word == "pard":
            self._state = state._replace(heading=-1, in_table=False)
            self._emit(token)
        elif word == "s" and number in self._headings:
            self._state = state._replace(heading=self._headings[number])
        elif word == "outlinelevel":
            self._state = state._replace(heading=min(int(number or 9), 9))
        elif word == "intbl":
            self._state = state._replace(in_table=True)
        elif word in ("cell", "nestcell"):
            self._begin_row()
            self._emit(f"{LEVEL}{CELL}" if word == "cell" else ", ")
            self._look = LEVEL
        elif word == "row":
            self._emit(f"{ROW}")
            self._in_row = False
        elif word in _TEXT_WORDS:
            self._text(token, marks=word == "u" or word in _QUOTES)
            if word == "par":
                self._said_heading = False
        else:
            self._emit(token)

    def _switched(self, name: str, on: bool) -> _State:
        state = self._state
        if name == "hidden":
            return state._replace(hidden=on)
        return state._replace(struck=on) if name == "struck" else state._replace(deleted=on)

    def _aside(self, mark: str) -> None:
        if self._out and self._out[-1].startswith("\\*"):
            self._out.pop()  # which would have striprtf leave it out
        self._emit(mark)
        self._look = LEVEL
        self._state = _State(end=END)

    def _begin_row(self) -> None:
        if not self._in_row:
            self._emit(TABLE)
            self._in_row = True

    def _text(self, token: str, *, marks: bool = True) -> None:
        state = self._state
        if state.deleted or (state.hidden and not self._take_hidden):
            self.n_hidden += state.hidden and not state.deleted and not self._skipping and bool(token.strip())
            self._skipping = self._skipping or bool(token.strip())
            return
        self._skipping = False
        if state.in_table and not self._in_row:
            self._begin_row()
        if marks and 0 <= state.heading < 9 and not self._said_heading and not state.in_table:
            self._emit(f"{HEADING}{state.heading}")
            self._said_heading = True
        if marks and state.look != self._look:
            self._look = state.look
            self._emit(self._look)
        self._emit(token)
