"""What a page's source holds and no reader of the page sees: removed, and counted."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ragserve.ingest.parsers.base import has_words

_AT_RULE = re.compile(r"@[^{};@]*+\{(?:[^{}]*+\{[^{}]*+\})*+[^{}]*+\}")
_SIMPLE = re.compile(r"\A[a-z]*+([.#][\w-]++)", re.I)  # a selector of one class or id
_LATER = re.compile(r":(?:target|checked|hover|focus|active|has)\b")  # what a reader does shows it
_SPACES = re.compile(r"\s++|!important")
_ZERO = re.compile(r"\+?(?:0+(?:\.0*)?|\.0+)(?:[a-z]+|%)?")
_CLEAR = re.compile(r"opacity\(0(?:%|\.0*)?\)")
_TINY = re.compile(r"(?:[01](?:\.\d*)?|\.\d+)(?:px|pt)")
_OFF_SCREEN = re.compile(r"-\d{3,}(?:\.\d+)?(?:px|em|rem|pt|vw|vh|%)?")
_FAINT = re.compile(r"0?\.0[0-4]\d*|[0-4](?:\.\d*)?%")  # an opacity
_WHITE = re.compile(
    r"white|transparent|#fff|#(?:f[c-f]){3}|rgba?\(25[2-5],25[2-5],25[2-5](?:,[\d.]+)?\)|rgba\(\d+,\d+,\d+,0\)|hsla?\(\d+,[\d.]+%,100%\)"
)
_CLOSED = ("dialog", "datalist")  # hidden as they are
_NEVER_SHOWN = ("template", "noscript", "iframe", "object", "canvas", "video", "audio")
_NEVER_TEXT = frozenset(["script", "style", "head", "title", "meta", "link", "template", "noscript"])
Style = dict[str, str]


class _Seen(NamedTuple):
    """What elements inherit: whether their text is visible, has a size, and differs from the paper."""

    visible: bool = True
    sized: bool = True
    white: bool = False
    paper: bool = True  # no background but white is set

    @property
    def shown(self) -> bool:
        return self.visible and self.sized and not (self.white and self.paper)


def drop_hidden(tree: Any, *, keep: bool = False, scripts: bool = True) -> int:
    """Remove the text that styles or attributes of elements hide. Returns the number of such passages.

    With ``keep`` the attributes go and the text stays. Without ``scripts``, as in mail and in pages that have
    none, nothing can show later what a class hides, so the page's own style sheets count too. White text is
    hidden on white paper, unless a style sheet may colour that.
    """
    sheets = "\n".join(node.text or "" for node in tree.iter("style"))
    changing = scripts and (next(tree.iter("script"), None) is not None or _LATER.search(sheets) is not None)
    hiding = {} if changing else _hiding_classes(sheets)
    links = ((link.get("rel") or "").lower() for link in tree.iter("link"))
    styled = bool(sheets.strip()) or any("stylesheet" in kind for kind in links)
    for node in list(tree.iter(*_NEVER_SHOWN)):  # what browsers show in their place is not in the page
        _remove(node)
    n_hidden = 0
    stack: list[tuple[Any, _Seen]] = [(tree, _Seen())]
    gone: list[Any] = []
    while stack:
        node, seen = stack.pop()
        if not isinstance(node.tag, str) or node.tag in _NEVER_TEXT:
            continue
        plain = not node.attrib  # as most elements are
        style = {} if plain else _style(node, hiding)
        if (not plain or node.tag in _CLOSED) and _removes(node, style):
            n_hidden += has_words("".join(node.itertext()))
            if keep:
                _reveal(node)
            else:
                gone.append(node)
                continue
        own = seen if plain else _inherited(seen, node, style, styled)
        if not own.shown:
            texts = [node.text, *(child.tail for child in node)]
            n_hidden += seen.shown and has_words("".join(node.itertext()))
            if keep:
                _reveal(node)
            elif any(texts):
                node.text = None
                for child in node:
                    child.tail = None
        stack.extend((child, own) for child in node)
    for node in gone:
        _remove(node)
    return n_hidden


def _remove(node: Any) -> None:
    if (parent := node.getparent()) is not None:
        _keep_tail(node, parent)
        parent.remove(node)


def _style(node: Any, hiding: dict[str, Style]) -> Style:
    found: Style = {}
    if hiding:
        for name in [*(f".{each}" for each in (node.get("class") or "").split()), f"#{node.get('id')}"]:
            found |= hiding.get(name, {})
    if inline := node.get("style"):
        found |= _declarations(inline)
    return found


def _declarations(source: str) -> Style:
    found: Style = {}
    for declaration in source.lower().split(";"):
        name, _, value = declaration.partition(":")
        found[name.strip()] = _SPACES.sub("", value)
    return found


def _hiding_classes(sheets: str) -> dict[str, Style]:
    """The styles of classes and ids, those for some screens only left out."""
    found: dict[str, Style] = {}
    head, *commented = sheets.split("/*")
    plain = _AT_RULE.sub("", head + "".join(part.partition("*/")[2] for part in commented))
    for rule in plain.split("}"):
        selectors, _, source = rule.partition("{")
        for selector in selectors.split(","):
            if name := _SIMPLE.fullmatch(selector.strip()):
                found.setdefault(name.group(1), {}).update(_declarations(source))
    return found


def _removes(node: Any, style: Style) -> bool:
    """Return whether all that is in an element is hidden, whatever its parts say."""
    if node.get("hidden") is not None or node.get("type") == "hidden" or node.tag == "datalist":
        return True
    if node.tag == "dialog" and node.get("open") is None:
        return True
    if not style:
        return False
    if style.get("display") == "none" or style.get("mso-hide") == "all":
        return True
    opacity = style.get("opacity", "")
    if _ZERO.fullmatch(opacity) or _FAINT.fullmatch(opacity) or style.get("content-visibility") == "hidden":
        return True
    if style.get("transform", "").startswith("scale(0)") or _CLEAR.match(style.get("filter", "")):
        return True
    low = any(_ZERO.fullmatch(style.get(side, "")) for side in ("height", "width", "max-height", "max-width"))
    if low and style.get("overflow", "").startswith(("hidden", "clip")):
        return True
    clipped = style.get("clip", "").startswith(("rect(0", "rect(1px,1px"))
    if clipped or "inset(50%" in style.get("clip-path", ""):
        return True
    placed = style.get("position") in ("absolute", "fixed")
    sides: tuple[str, ...] = ("left", "top", "right", "bottom") if placed else ()
    sides += ("text-indent", "margin-left", "margin-top")
    return any(_OFF_SCREEN.fullmatch(style.get(side, "")) for side in sides)


def _inherited(seen: _Seen, node: Any, style: Style, styled: bool) -> _Seen:
    if visibility := style.get("visibility"):
        seen = seen._replace(visible=visibility not in ("hidden", "collapse"))
    if size := style.get("font-size") or (style.get("font", "").startswith("0/") and "0"):
        relative = size.endswith(("em", "%")) and not size.endswith("rem") and not seen.sized
        seen = seen._replace(sized=not (relative or _ZERO.fullmatch(size) or _TINY.fullmatch(size)))
    colour = style.get("color") or _attribute(node, "color")
    back = style.get("background-color") or style.get("background") or _attribute(node, "bgcolor")
    if node.get("background") or "background-image" in style:
        back = "image"
    on_white = _WHITE.fullmatch(back) is not None
    if back and back not in ("none", "inherit"):
        seen = seen._replace(paper=on_white)
    if colour and colour != "inherit":
        # a style sheet may have coloured what is behind it, unless the element says itself that it is white
        white = _WHITE.fullmatch(colour) is not None
        seen = seen._replace(white=white and (on_white or not styled))
    return seen


def _attribute(node: Any, name: str) -> str:
    return _SPACES.sub("", (node.get(name) or "").lower())


def _reveal(node: Any) -> None:
    node.tag = "div" if node.tag in _CLOSED else node.tag
    for name in ("hidden", "style", "aria-hidden"):
        node.attrib.pop(name, None)


def _keep_tail(node: Any, parent: Any) -> None:
    """Leave the text behind an element where it is when the element goes."""
    if node.tail:
        before = node.getprevious()
        if before is None:
            parent.text = (parent.text or "") + node.tail
        else:
            before.tail = (before.tail or "") + node.tail
