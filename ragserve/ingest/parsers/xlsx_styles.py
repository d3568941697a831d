"""The styles of a workbook that change what its cells say: number formats, struck-out and unseen text."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from ragserve.ingest.parsers.number_formats import BUILT_IN
from ragserve.ingest.parsers.ooxml import as_int, is_on

_T = TypeVar("_T")
MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


class CellStyle(NamedTuple):
    """The format of a cell's number, and whether its text is struck out, or has the colour of what is behind
    it."""

    code: str = "General"
    struck: bool = False
    unseen: bool = False


class _Font(NamedTuple):
    struck: bool
    color: str


def cell_styles(root: Any | None) -> list[CellStyle]:
    """The styles that cells name by number. All else in ``root``, the part of styles, may be broken."""
    if root is None:
        return []
    codes = dict(BUILT_IN)
    for node in root.iter(f"{MAIN}numFmt"):
        if (number := node.get("numFmtId") or "").isdigit():
            codes[int(number)] = node.get("formatCode") or "General"
    fonts = [_font(node) for node in root.iterfind(f"{MAIN}fonts/{MAIN}font")]
    fills = [_fill(node) for node in root.iterfind(f"{MAIN}fills/{MAIN}fill")]
    styles = []
    for xf in root.iterfind(f"{MAIN}cellXfs/{MAIN}xf"):
        font = _at(fonts, xf.get("fontId"), _Font(False, ""))
        unseen = bool(font.color) and font.color == _at(fills, xf.get("fillId"), "")
        code = codes.get(int(number) if (number := xf.get("numFmtId") or "").isdigit() else 0, "General")
        styles.append(CellStyle(code, font.struck, unseen))
    return styles


def is_struck(font: Any) -> bool:
    """Whether a font, or the properties of a run, strike text out."""
    strike = font.find(f"{MAIN}strike")
    return strike is not None and is_on(strike.get("val"))


def _font(node: Any) -> _Font:
    return _Font(is_struck(node), _color(node.find(f"{MAIN}color")))


def _fill(node: Any) -> str:
    """The colour that fills a cell: white where nothing does, empty where it is not known."""
    pattern = node.find(f"{MAIN}patternFill")
    if pattern is None:
        return "FFFFFF" if node.find(f"{MAIN}gradientFill") is None else ""
    kind = pattern.get("patternType") or "none"
    if kind == "none":
        return "FFFFFF"
    return _color(pattern.find(f"{MAIN}fgColor")) if kind == "solid" else ""


def _color(node: Any | None) -> str:
    """A colour as ``RRGGBB``; empty where it is another than white of the workbook's theme, or none."""
    if node is None:
        return ""
    if node.get("theme") == "0" and (node.get("tint") or "0").strip("-0.") == "":
        return "FFFFFF"
    return (node.get("rgb") or "").upper()[-6:]


def _at(items: list[_T], number: str | None, default: _T) -> _T:
    place = as_int(number)
    return items[place] if 0 <= place < len(items) else default
