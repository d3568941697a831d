"""Styles of OpenDocument files: what hides text or raises it, and how lists are numbered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ragserve.ingest.parsers.list_numbers import list_number
from ragserve.ingest.parsers.ooxml import as_int

_URN = "{urn:oasis:names:tc:opendocument:xmlns:%s:1.0}"
TEXT, STYLE, TABLE, OFFICE, DRAW, PRESENTATION, SVG = (
    _URN % name for name in ("text", "style", "table", "office", "drawing", "presentation", "svg-compatible")
)
_NUMBER_FORMS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman", "1": "decimal"}
_MOST_LEVELS = 10
_POSITION = re.compile(r"(super|sub|-?\d{1,4}(?:\.\d{1,6})?%)")
_MOST_PARENTS = 20  # of a style: a longer chain is a circle


class OdfLook(NamedTuple):
    """How text is shown. ``place`` is 1 for superscripts and -1 for subscripts; None: as around it."""

    hidden: bool | None = None
    place: int | None = None
    struck: bool | None = None

    def within(self, outer: OdfLook) -> OdfLook:
        """This look where it says something, else the outer one."""
        return OdfLook(
            outer.hidden if self.hidden is None else self.hidden,
            outer.place if self.place is None else self.place,
            outer.struck if self.struck is None else self.struck,
        )


class OdfStyles:
    """The styles of a file, from the roots of its parts, the content's last."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._nodes: dict[tuple[str, str], Any] = {}
        self._looks: dict[tuple[str, str], OdfLook] = {}
        self._lists: dict[str, Any] = {}
        self.outline: Any | None = None
        for root in roots:
            for node in root.iter(f"{STYLE}style"):
                self._nodes[node.get(f"{STYLE}family") or "", node.get(f"{STYLE}name") or ""] = node
            for node in root.iter(f"{TEXT}list-style"):
                self._lists[node.get(f"{STYLE}name") or ""] = node
            for node in root.iter(f"{TEXT}outline-style"):
                self.outline = node

    def look(self, family: str, name: str | None) -> OdfLook:
        """The look of a style and of those that it is derived from."""
        key = family, name or ""
        if key not in self._looks:
            look, node, seen = OdfLook(), self._nodes.get(key), 0
            while node is not None and seen < _MOST_PARENTS:
                look = look.within(_look(node.find(f"{STYLE}text-properties")))
                node, seen = self._nodes.get((family, node.get(f"{STYLE}parent-style-name") or "")), seen + 1
            self._looks[key] = look
        return self._looks[key]

    def properties(self, family: str, name: str | None) -> dict[str, str]:
        """All properties of one style, as ``table:display``'s last part and others name them."""
        node = self._nodes.get((family, name or ""))
        found: dict[str, str] = {}
        for child in node if node is not None else ():
            if isinstance(child.tag, str) and child.tag.endswith("-properties"):
                found.update({str(key).rsplit("}", 1)[-1]: str(value) for key, value in child.attrib.items()})
        return found

    def list_style(self, name: str | None, paragraph: str | None = None) -> Any | None:
        """A list's style, by its own name or by that of its paragraphs' style."""
        if name is None and paragraph is not None:
            node = self._nodes.get(("paragraph", paragraph))
            name = node.get(f"{STYLE}list-style-name") if node is not None else None
        return self._lists.get(name or "")


def _look(properties: Any | None) -> OdfLook:
    if properties is None:
        return OdfLook()
    get = {str(key).rsplit("}", 1)[-1]: value for key, value in properties.attrib.items()}.get
    display, through = get("display"), get("text-line-through-style") or get("text-line-through-type")
    found = _POSITION.match(get("text-position") or "")
    place = None
    if found:
        place = {"super": 1, "sub": -1}.get(found[1])
        if place is None:
            height = float(found[1].rstrip("%"))
            place = (height > 0) - (height < 0)
    return OdfLook(
        None if display is None else display == "none",
        place,
        None if through is None else through != "none",
    )


class Numbers:
    """Counts the items of lists, or headings, of one style."""

    def __init__(self) -> None:
        self._counts = [0] * (_MOST_LEVELS + 1)

    def next(self, style: Any | None, level: int, start: str | None = None) -> str:
        """What stands before an item of ``level``, from 1: ``2.1)``, ``-``; empty for nothing."""
        if style is None:
            return "-"
        level = max(1, min(level, _MOST_LEVELS))
        forms = {as_int(node.get(f"{TEXT}level")): node for node in style if isinstance(node.tag, str)}
        own = forms.get(level)
        if own is None:
            return ""
        if own.tag.endswith("level-style-bullet"):
            return "-"
        first = as_int(start or own.get(f"{TEXT}start-value"), 1)
        self._counts[level] = first if start or not self._counts[level] else self._counts[level] + 1
        self._counts[level + 1 :] = [0] * (_MOST_LEVELS - level)
        if not own.get(f"{STYLE}num-format"):
            return ""
        shown = max(1, min(as_int(own.get(f"{TEXT}display-levels"), 1), level))
        parts = []
        for at in range(level - shown + 1, level + 1):
            form = forms[at].get(f"{STYLE}num-format") if at in forms else ""
            if form:
                parts.append(list_number(max(1, self._counts[at]), _NUMBER_FORMS.get(form, "decimal")))
        text = ".".join(parts)
        return f"{own.get(f'{STYLE}num-prefix') or ''}{text}{own.get(f'{STYLE}num-suffix') or ''}"
