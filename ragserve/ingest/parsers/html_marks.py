"""Elements of HTML that change what their text says, written into it: powers, footnotes, fractions, ruby,
struck-out words, the numbers of lists, descriptions and captions of images."""

from __future__ import annotations

import re
from typing import Any

from ragserve.ingest.parsers.list_numbers import list_number
from ragserve.ingest.parsers.small_text import lowered, raised, raised_behind, struck

_BLOCKS = ("p", "div", "section", "article", "ul", "ol", "table", "blockquote", "pre", "h1", "h2", "h3", "h4")
_FIRST = ("p", "div", "span", "a", "b")  # where the text of a list's item may begin
_PLAIN = {
    **dict.fromkeys(("q", "time", "label", "output", "legend", "textarea"), "span"),
    "fieldset": "div",
}
_INLINE = ("span", "font", "small", "a", "b", "i", "u", "em", "strong")
_STRUCK = re.compile(r"text-decoration(?:-line)?\s*+:[^;]*line-through")
_PLACE = re.compile(r"vertical-align\s*+:\s*+(super|sub)\b")
_LIST_STYLE = re.compile(r"list-style(?:-type)?\s*+:\s*+([a-z-]++)")
_LIST_KINDS = {"none": "none", "lower-roman": "i", "upper-roman": "I"}
_LIST_KINDS |= dict.fromkeys(("lower-alpha", "lower-latin"), "a") | dict.fromkeys(
    ("upper-alpha", "upper-latin"), "A"
)
_ROWS = ("math", "mrow", "mstyle", "semantics", "mtd")  # of MathML
_UNSHOWN = ("hidden", "password", "image", "file", "color", "range", "button", "submit", "reset")
_NOTE = re.compile(r"\d{1,3}(?:\s?,\s?\d{1,3})*+|[a-z]")
_WHOLE = re.compile(r"\A\s*+[-+]?\d{1,9}\s*+")


def write_marks(tree: Any) -> None:
    """Replace such elements of a tree by text."""
    for node in tree.iter(*_INLINE):
        if style := node.get("style"):
            _name_by_style(node, style.lower())
    for node in list(tree.iter("svg")):  # what its icons say is not seen, what it writes is
        _to_text(node, " ".join(" ".join("".join(each.itertext()).split()) for each in node.iter("text")))
    for node in list(tree.iter("input")):
        _to_text(node, _entered(node))
    for node in tree.iter("q"):
        _quote(node)
    for node in tree.iter(*_PLAIN):  # trafilatura would leave them out, with what they say
        node.tag = _PLAIN[node.tag]
    for node in list(tree.iter("math")):
        try:
            formula = _formula(node)
        except RecursionError:
            formula = "".join(node.itertext())
        _to_text(node, " ".join(formula.split()))
    for node in list(tree.iter("ruby")):
        for below in list(node.iter("rp", "rt")):
            inner = "".join(below.itertext()).strip()
            _to_text(below, f"({inner})" if below.tag == "rt" and inner else "")
    for tag in ("sup", "sub"):
        for node in reversed(list(tree.iter(tag))):
            _script(node)
    for node in reversed(list(tree.iter("del", "s", "strike"))):
        if next(node.iter(*_BLOCKS), None) is None:
            _to_text(node, struck("".join(node.itertext())))
        else:
            for part in node.iter():
                part.text = struck(part.text) if isinstance(part.tag, str) and part.text else part.text
                part.tail = struck(part.tail) if part is not node and part.tail else part.tail
            node.tag = "div"
    for node in tree.iter("ol"):
        _number(node)
    for node in list(tree.iter("img")):
        described = " ".join((node.get("alt") or "").split())
        _to_text(node, f"[Image: {described}]" if " " in described else "")  # one word names a sign or a file
    for node in list(tree.iter("figcaption")):  # else trafilatura leaves it out
        node.tag = "p"
        if (figure := node.getparent()) is not None and figure.tag == "figure":
            figure.tag = "div"


def _name_by_style(node: Any, style: str) -> None:
    """Give an element whose style strikes out, raises or lowers its text the name of one that does."""
    if _STRUCK.search(style):
        node.tag = "s"
    elif place := _PLACE.search(style):
        node.tag = "sup" if place.group(1) == "super" else "sub"


def _entered(node: Any) -> str:
    """What a field of a form shows."""
    kind = (node.get("type") or "text").lower()
    if kind in ("checkbox", "radio"):
        return "☒" if node.get("checked") is not None else "☐"
    return "" if kind in _UNSHOWN else node.get("value") or ""


def _quote(node: Any) -> None:
    """Write the quotation marks that a browser puts around an element."""
    node.text = f"“{node.text or ''}"
    if len(node):
        node[-1].tail = f"{node[-1].tail or ''}”"
    else:
        node.text += "”"


def _script(node: Any) -> None:
    """Write a superscript or subscript as text."""
    text = "".join(node.itertext())
    inner = text.strip()
    if node.tag == "sub":
        _to_text(node, lowered(text))
        return
    below = node.getnext()
    if (node.tail or "").strip() in ("/", "⁄") and below is not None and below.tag == "sub":
        fraction = f"{inner}/{''.join(below.itertext()).strip()}"
        before = _before(node)[-1:]
        _to_text(below, "")
        node.tail = (node.tail or "").lstrip()[1:]
        _to_text(node, f" {fraction}" if before.isdigit() else fraction)
    elif _NOTE.fullmatch(inner) and _is_reference(node):
        _to_text(node, f"[{inner}]")
    else:
        _to_text(node, raised_behind(_before(node), text))


def _is_reference(node: Any) -> bool:
    """Return whether a superscript leads to a note."""
    links = [*node.iter("a"), *node.iterancestors("a")]
    return any("#" in (link.get("href") or "") or link.get("rel") == "footnote" for link in links)


def _before(node: Any) -> str:
    """The end of the text before an element, as far as its own parent or its neighbour holds it."""
    before = node.getprevious()
    if before is None:
        parent = node.getparent()
        return (parent.text or "")[-8:] if parent is not None else ""
    return ("".join(before.itertext())[-8:] + (before.tail or ""))[-8:]


def _formula(node: Any) -> str:
    """MathML as a line of text."""
    parts: list[str] = []
    for child in node:
        if isinstance(child.tag, str) and child.tag != "annotation":
            part = _formula(child)
            mixed = child.tag == "mfrac" and node.tag in _ROWS and parts and parts[-1][-1:].isalnum()
            parts.append(f" {part}" if mixed else part)  # a whole number before a fraction
    if node.tag in ("annotation-xml", "mphantom"):
        return ""
    if node.tag == "msup" and len(parts) == 2:
        return parts[0] + raised(parts[1])
    if node.tag == "msub" and len(parts) == 2:
        return parts[0] + lowered(parts[1])
    if node.tag == "msubsup" and len(parts) == 3:
        return parts[0] + lowered(parts[1]) + raised(parts[2])
    if node.tag == "mfrac" and len(parts) == 2:
        return "/".join(part if part.strip().isalnum() else f"({part.strip()})" for part in parts)
    if node.tag == "msqrt":
        return f"√({''.join(parts)})"
    if node.tag == "mroot" and len(parts) == 2:
        return f"({parts[1]})√({parts[0]})"
    if node.tag in ("munder", "munderover") and len(parts) > 1:
        return parts[0] + lowered(parts[1]) + "".join(map(raised, parts[2:])) + " "
    if node.tag == "mover" and len(parts) == 2 and parts[1].strip().isalnum():
        return parts[0] + raised(parts[1]) + " "
    if node.tag == "mfenced":
        return f"{node.get('open', '(')}{', '.join(parts)}{node.get('close', ')')}"
    if node.tag == "mtable":
        return f"[{'; '.join(parts)}]"
    if node.tag in ("mtr", "mlabeledtr"):
        return ", ".join(parts)
    if node.tag == "mspace":
        return " "
    if node.tag == "mo":
        sign = (node.text or "").strip()
        return f" {sign} " if sign in ("=", "≤", "≥", "<", ">", "≈", "→", "∈") else sign
    return (node.text or "").strip() + "".join(parts)


def _number(ordered: Any) -> None:
    """Write the numbers of a list before its items."""
    items = [item for item in ordered if item.tag == "li"]
    style = _LIST_STYLE.search((ordered.get("style") or "").lower())
    kind = _LIST_KINDS.get(style.group(1), "1") if style else ordered.get("type") or "1"
    if kind == "none":
        return
    backwards = ordered.get("reversed") is not None
    at = _int(ordered.get("start"), len(items) if backwards else 1)
    for item in items:
        at = _int(item.get("value"), at)
        place = item
        while not (place.text or "").strip() and len(place) and place[0].tag in _FIRST:
            place = place[0]
        place.text = f"{_label(at, kind)}. {(place.text or '').lstrip()}"
        at += -1 if backwards else 1


def _label(number: int, kind: str) -> str:
    if kind in ("i", "I"):
        return list_number(number, "lowerRoman" if kind == "i" else "upperRoman")
    if kind not in ("a", "A") or number < 1:
        return str(number)
    label = ""
    while number:
        number, letter = divmod(number - 1, 26)
        label = chr(ord(kind) + letter) + label
    return label


def _int(value: str | None, default: int) -> int:
    return int(value) if value and _WHOLE.fullmatch(value) else default


def _to_text(node: Any, text: str) -> None:
    """Put text in the place of an element."""
    parent = node.getparent()
    if parent is None:
        return
    text += node.tail or ""
    before = node.getprevious()
    if before is None:
        parent.text = (parent.text or "") + text
    else:
        before.tail = (before.tail or "") + text
    parent.remove(node)
