"""Paragraphs of slides: runs, numbers of lists and equations."""

from __future__ import annotations

import re
from typing import Any

from ragserve.ingest.parsers.list_numbers import list_number, symbol
from ragserve.ingest.parsers.office_math import MATH, math_text
from ragserve.ingest.parsers.ooxml import as_int
from ragserve.ingest.parsers.small_text import Run, joined_runs

A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"

_CHOICE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_NUMBERED = re.compile(r"(arabic|romanUc|romanLc|alphaUc|alphaLc)(ParenBoth|ParenR|Period|Plain)")
_FORMS = {
    "arabic": "decimal",
    "romanUc": "upperRoman",
    "romanLc": "lowerRoman",
    "alphaUc": "upperLetter",
    "alphaLc": "lowerLetter",
}
_AROUND = {"ParenBoth": "({})", "ParenR": "{})", "Period": "{}.", "Plain": "{}"}


def body_text(body: Any) -> str:
    """The paragraphs of a shape, each on a line, with the numbers of lists."""
    counts: dict[int, tuple[str, int]] = {}  # by level: the kind of numbers, and the last one
    lines = []
    for paragraph in body.iterchildren(f"{A}p"):
        text = _paragraph(paragraph)
        properties = paragraph.find(f"{A}pPr")
        level = as_int(properties.get("lvl")) if properties is not None else 0
        number = None if properties is None else properties.find(f"{A}buAutoNum")
        counts = {each: count for each, count in counts.items() if each <= level}
        if number is None:
            counts.pop(level, None) if text else None
        elif text:
            kind, first = number.get("type") or "", as_int(number.get("startAt"), 1)
            before, last = counts.get(level, ("", 0))
            counts[level] = kind, last + 1 if before == kind else first
            text = f"{_label(kind, counts[level][1])} {text}"
        lines.append(text)
    return "\n".join(lines).strip()


def _label(kind: str, number: int) -> str:
    match = _NUMBERED.fullmatch(kind)
    if match is None:
        return f"{number}."
    return _AROUND[match[2]].format(list_number(number, _FORMS[match[1]]))


def _paragraph(paragraph: Any) -> str:
    runs: list[Run] = []
    stack = list(reversed(paragraph))
    while stack:
        node = stack.pop()
        if node.tag in (f"{A}r", f"{A}fld"):
            runs.append(_run(node))
        elif node.tag == f"{A}br":
            runs.append(Run("\n"))
        elif node.tag in (f"{MATH}oMath", f"{MATH}oMathPara"):
            runs.append(Run(math_text(node)))
        elif node.tag == f"{_CHOICE}AlternateContent":
            chosen = node.find(f"{_CHOICE}Choice")
            stack.extend(reversed(chosen if chosen is not None else ()))
        elif isinstance(node.tag, str) and node.tag.endswith("}m"):  # around an equation
            stack.extend(reversed(node))
    return joined_runs(runs).replace("\v", "\n").strip()


def _run(node: Any) -> Run:
    text = node.findtext(f"{A}t") or ""
    look = node.find(f"{A}rPr")
    if look is None:
        return Run(text)
    font = look.find(f"{A}sym")
    if font is not None:
        shown = ((letter, symbol(font.get("typeface") or "", ord(letter))) for letter in text)
        text = "".join(sign if sign and 0xE000 <= ord(letter) <= 0xF8FF else letter for letter, sign in shown)
    lifted = (look.get("baseline") or "0").rstrip("%")
    place = 0 if lifted.strip("-0.") == "" else -1 if lifted.startswith("-") else 1
    return Run(text, place, look.get("strike") in ("sngStrike", "dblStrike"))
