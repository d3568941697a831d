"""The styles of a workbook that change what its cells say: number formats, struck-out and unseen text."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from ragserve.ingest.parsers.number_formats import BUILT_IN
from ragserve.ingest.parsers.ooxml import as_int, is_on

_T = TypeVar("_T")
MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


class CellStyle(NamedTuple):
    """The format of a cell's number, and whether its text is struck out, or white on no fill."""

    code: str = "General"
    struck: bool = False
    unseen: bool = False


class _Font(NamedTuple):
    struck: bool
    white: bool


def cell_styles(root: Any | None) -> list[CellStyle]:
    """The styles that cells name by number. All else in ``root``, the part of styles, may be broken."""
    if root is None:
        return []
    codes = dict(BUILT_IN)
    for node in root.iter(f"{MAIN}numFmt"):
        if (number := node.get("numFmtId") or "").isdigit():
            codes[int(number)] = node.get("formatCode") or "General"
    fonts = [_font(node) for node in root.iterfind(f"{MAIN}fonts/{MAIN}font")]
    filled = [_is_filled(node) for node in root.iterfind(f"{MAIN}fills/{MAIN}fill")]
    styles = []
    for xf in root.iterfind(f"{MAIN}cellXfs/{MAIN}xf"):
        font = _at(fonts, xf.get("fontId"), _Font(False, False))
        unseen = font.white and not _at(filled, xf.get("fillId"), True)
        code = codes.get(int(number) if (number := xf.get("numFmtId") or "").isdigit() else 0, "General")
        styles.append(CellStyle(code, font.struck, unseen))
    return styles


def is_struck(font: Any) -> bool:
    """Whether a font, or the properties of a run, strike text out."""
    strike = font.find(f"{MAIN}strike")
    return strike is not None and is_on(strike.get("val"))


def _font(node: Any) -> _Font:
    color = node.find(f"{MAIN}color")
    white = color is not None and (
        (color.get("rgb") or "").upper() in ("FFFFFFFF", "00FFFFFF", "FFFFFF")
        or (color.get("theme") == "0" and (color.get("tint") or "0").strip("-0.") == "")
    )
    return _Font(is_struck(node), white)


def _is_filled(node: Any) -> bool:
    pattern = node.find(f"{MAIN}patternFill")
    if pattern is None:
        return node.find(f"{MAIN}gradientFill") is not None
    return (pattern.get("patternType") or "none") != "none"


def _at(items: list[_T], number: str | None, default: _T) -> _T:
    place = as_int(number)
    return items[place] if 0 <= place < len(items) else default
