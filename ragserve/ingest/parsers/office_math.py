"""Equations of Office files (OMML, ECMA-376 part 1, 22.1) on one line, in reading order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragserve.ingest.parsers.small_text import lowered, raised

MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"


def math_text(node: Any) -> str:
    """An equation, or a part of one, as text: ``(a + b)/2``, ``x_i^2``, ``√(x)``."""
    if not isinstance(node.tag, str):
        return ""
    name = node.tag.removeprefix(MATH)
    if name == node.tag or name.endswith("Pr"):  # properties, and what other namespaces add
        return ""
    if name == "t":
        return node.text or ""
    if name in _FORMS:
        return _FORMS[name](node)
    if name == "oMathPara":
        return "; ".join(filter(None, map(math_text, node.iterchildren(f"{MATH}oMath"))))
    text = ""
    for child in node:
        part = math_text(child)
        # a whole number before a fraction
        text += f" {part}" if child.tag == f"{MATH}f" and text[-1:].isalnum() else part
    return text


def _part(node: Any, name: str) -> str:
    found = node.find(f"{MATH}{name}")
    return "" if found is None else math_text(found)


def _property(node: Any, name: str, default: str) -> str:
    """A property's value; ``default`` where it is not given."""
    found = node.find(f"{node.tag}Pr/{MATH}{name}")
    return default if found is None else found.get(f"{MATH}val") or ""


def _is_on(node: Any, name: str) -> bool:
    found = node.find(f"{node.tag}Pr/{MATH}{name}")
    return found is not None and found.get(f"{MATH}val") not in ("0", "off", "false")


def _whole(text: str) -> str:
    """The text in brackets, unless it is one word."""
    return text if text.replace(".", "").isalnum() else f"({text})"


def _fraction(node: Any) -> str:
    above, below = _part(node, "num"), _part(node, "den")
    if _property(node, "type", "bar") == "noBar":
        return f"{above} over {below}"
    return f"{_whole(above)}/{_whole(below)}"


def _root(node: Any) -> str:
    degree = "" if _is_on(node, "degHide") else _part(node, "deg")
    return f"√{f'[{degree}]' if degree else ''}({_part(node, 'e')})"


def _sum(node: Any) -> str:
    sign = _property(node, "chr", "∫")
    limits = lowered(_part(node, "sub")) + raised(_part(node, "sup"))
    return f"{sign}{limits} {_part(node, 'e')}"


def _brackets(node: Any) -> str:
    between = _property(node, "sepChr", "|")
    inner = between.join(map(math_text, node.iterchildren(f"{MATH}e")))
    return _property(node, "begChr", "(") + inner + _property(node, "endChr", ")")


def _function(node: Any) -> str:
    of = _part(node, "e")
    return _part(node, "fName") + (of if of.startswith(("(", "[")) else f" {of}")


def _matrix(node: Any) -> str:
    rows = (", ".join(map(math_text, row.iterchildren(f"{MATH}e"))) for row in node.iterchildren(f"{MATH}mr"))
    return f"[{'; '.join(rows)}]"


_FORMS: dict[str, Callable[[Any], str]] = {
    "f": _fraction,
    "rad": _root,
    "nary": _sum,
    "d": _brackets,
    "func": _function,
    "m": _matrix,
    "sSup": lambda node: _part(node, "e") + raised(_part(node, "sup")),
    "sSub": lambda node: _part(node, "e") + lowered(_part(node, "sub")),
    "sSubSup": lambda node: _part(node, "e") + lowered(_part(node, "sub")) + raised(_part(node, "sup")),
    "sPre": lambda node: lowered(_part(node, "sub")) + raised(_part(node, "sup")) + _part(node, "e"),
    "limLow": lambda node: _part(node, "e") + lowered(_part(node, "lim")),
    "limUpp": lambda node: _part(node, "e") + raised(_part(node, "lim")),
    "acc": lambda node: _part(node, "e") + _property(node, "chr", "\u0302"),
    "bar": lambda node: _part(node, "e") + "\u0305",
    "eqArr": lambda node: "; ".join(map(math_text, node.iterchildren(f"{MATH}e"))),
}
