"""Styles and list numbers of Word documents: a paragraph's level, its number and its look."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ragserve.ingest.parsers.list_numbers import list_number
from ragserve.ingest.parsers.ooxml import is_on

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
VAL = f"{W}val"

_HEADING = re.compile(r"heading ([1-9])", re.I)
_LEVEL = re.compile(r"%(\d)")
_DEPTH = 50  # styles that a style may be based on
_NO_SHADE = ("clear", "nil", None)


class Look(NamedTuple):
    """What matters of a run's properties; None where they say nothing."""

    hidden: bool | None = None
    struck: bool | None = None
    place: int | None = None  # 1: superscript, -1: subscript
    white: bool | None = None
    shaded: bool | None = None
    tiny: bool | None = None
    font: str | None = None

    def under(self, other: Look) -> Look:
        """The look with what ``other`` says over it."""
        said = {name: value for name, value in other._asdict().items() if value is not None}
        return self._replace(**said)


class Styles:
    """The styles of a document; none if its part is absent or broken."""

    def __init__(self, root: Any | None) -> None:
        nodes = root.iterchildren(f"{W}style") if root is not None else ()
        self._nodes = {node.get(f"{W}styleId"): node for node in nodes}
        defaults = [s for s in self._nodes.values() if s.get(f"{W}type") == "paragraph"]
        self._default = next((s.get(f"{W}styleId") for s in defaults if s.get(f"{W}default") == "1"), None)
        self._looks: dict[str | None, Look] = {}

    def chain(self, style: str | None) -> list[Any]:
        """A style, and those that it is based on."""
        found: list[Any] = []
        while style in self._nodes and len(found) < _DEPTH:
            found.append(self._nodes[style])
            style = _value(found[-1].find(f"{W}basedOn"))
        return found

    def of(self, paragraph: Any) -> str | None:
        """The id of a paragraph's style."""
        return _value(paragraph.find(f"{W}pPr/{W}pStyle")) or self._default

    def look(self, style: str | None) -> Look:
        """The look of a style's text."""
        if style not in self._looks:
            look = Look()
            for node in reversed(self.chain(style)):
                look = look.under(look_of(node.find(f"{W}rPr"), node.find(f"{W}pPr")))
            self._looks[style] = look
        return self._looks[style]

    def level(self, paragraph: Any) -> int:
        """A heading's level, from 1; 0 for other paragraphs."""
        own = _value(paragraph.find(f"{W}pPr/{W}outlineLvl"))
        if own is not None and own.isdigit():
            return int(own) + 1 if int(own) < 9 else 0
        for node in self.chain(self.of(paragraph)):
            name = _value(node.find(f"{W}name")) or ""
            outline = _value(node.find(f"{W}pPr/{W}outlineLvl"))
            if name.lower() == "title":
                return 1
            if heading := _HEADING.fullmatch(name):
                return int(heading[1])
            if outline is not None and outline.isdigit():
                return int(outline) + 1 if int(outline) < 9 else 0
        return 0


def look_of(run: Any | None, paragraph: Any | None = None) -> Look:
    """The look that properties of a run, and of a paragraph around it, give."""
    shades = [node.find(f"{W}shd") for node in (run, paragraph) if node is not None]
    shaded = any(s is not None and _is_shade(s) for s in shades) or None
    if run is None:
        return Look(shaded=shaded)
    place = _value(run.find(f"{W}vertAlign"))
    color = _value(run.find(f"{W}color"))
    size = _value(run.find(f"{W}sz"))
    fonts = run.find(f"{W}rFonts")
    lit = _value(run.find(f"{W}highlight"))
    return Look(
        _switch(run, "vanish"),
        _switch(run, "strike", "dstrike"),
        None if place is None else {"superscript": 1, "subscript": -1}.get(place, 0),
        None if color is None else color.upper() == "FFFFFF",
        True if lit not in (None, "none", "white") else shaded,
        None if size is None or not size.isdigit() else int(size) <= 2,  # half points
        None if fonts is None else fonts.get(f"{W}ascii"),
    )


def _is_shade(node: Any) -> bool:
    fill = (node.get(f"{W}fill") or "auto").lower()
    return fill not in ("auto", "ffffff") or node.get(VAL) not in _NO_SHADE


class Numbering:
    """Counts the paragraphs of a document's lists."""

    def __init__(self, root: Any | None, styles: Styles) -> None:
        self._styles = styles
        lists = root.iterchildren(f"{W}abstractNum") if root is not None else ()
        self._lists = {node.get(f"{W}abstractNumId"): node for node in lists}
        uses = root.iterchildren(f"{W}num") if root is not None else ()
        self._uses = {node.get(f"{W}numId"): node for node in uses}
        self._counts: dict[str, dict[int, int]] = {}
        self._started: set[tuple[str, int]] = set()

    def label(self, paragraph: Any) -> str:
        """The paragraph's number, or "-" for a bullet; empty for one that is in no list. Counts it."""
        use, level = self._place(paragraph)
        which = self._list(use)
        if use is None or which is None:
            return ""
        counts = self._counts.setdefault(which, {})
        override = _value(self._override(use, level, "startOverride"))
        if override is not None and (use, level) not in self._started and override.isdigit():
            counts[level] = int(override)
        elif level in counts:
            counts[level] += 1
        else:
            counts[level] = self._start(use, level)
        self._started.add((use, level))
        for deeper in [each for each in counts if each > level]:
            if _value(self._part(use, deeper, "lvlRestart")) != "0":
                del counts[deeper]
        form = self._form(use, level)
        if form == "bullet":
            return "-"
        legal = self._part(use, level, "isLgl") is not None

        def number(match: re.Match[str]) -> str:
            at = int(match[1]) - 1
            count = counts.setdefault(at, self._start(use, at))
            return list_number(count, "decimal" if legal else self._form(use, at))

        return _LEVEL.sub(number, _value(self._part(use, level, "lvlText")) or "").strip()

    def _place(self, paragraph: Any) -> tuple[str | None, int]:
        """The list's use, and the level in it."""
        style = self._styles.of(paragraph)
        found = [paragraph.find(f"{W}pPr/{W}numPr")]
        found += [node.find(f"{W}pPr/{W}numPr") for node in self._styles.chain(style)]
        places = [node for node in found if node is not None]
        use = next((v for node in places if (v := _value(node.find(f"{W}numId"))) is not None), None)
        level = next((v for node in places if (v := _value(node.find(f"{W}ilvl"))) is not None), None)
        if level is None:
            linked = (n for n in range(9) if style and _value(self._part(use, n, "pStyle")) == style)
            return use, next(linked, 0)
        return use, int(level) if level.isdigit() else 0

    def _list(self, use: str | None) -> str | None:
        """The id of the list that a use counts in: one that names a style counts in the style's."""
        for _ in range(_DEPTH):
            node = self._uses.get(use)
            which = None if node is None else _value(node.find(f"{W}abstractNumId"))
            if which not in self._lists:
                return None
            style = _value(self._lists[which].find(f"{W}numStyleLink"))
            if style is None:
                return which
            chain = self._styles.chain(style)
            use = _value(chain[0].find(f"{W}pPr/{W}numPr/{W}numId")) if chain else None
        return None

    def _part(self, use: str | None, level: int, name: str) -> Any | None:
        own = self._override(use, level, "lvl")
        which = self._list(use)
        nodes = [own] if own is not None else []
        if which is not None:
            levels = self._lists[which].iterchildren(f"{W}lvl")
            nodes += [node for node in levels if node.get(f"{W}ilvl") == str(level)]
        return next((part for node in nodes if (part := node.find(f"{W}{name}")) is not None), None)

    def _override(self, use: str | None, level: int, name: str) -> Any | None:
        node = self._uses.get(use)
        for each in node.iterchildren(f"{W}lvlOverride") if node is not None else ():
            if each.get(f"{W}ilvl") == str(level):
                return each.find(f"{W}{name}")
        return None

    def _start(self, use: str, level: int) -> int:
        start = _value(self._part(use, level, "start")) or ""
        return int(start) if start.isdigit() else 1

    def _form(self, use: str, level: int) -> str:
        return _value(self._part(use, level, "numFmt")) or "decimal"


def _switch(node: Any, *names: str) -> bool | None:
    found = [each for name in names if (each := node.find(f"{W}{name}")) is not None]
    return any(is_on(each.get(VAL)) for each in found) if found else None


def _value(node: Any | None) -> str | None:
    return None if node is None else node.get(VAL)
