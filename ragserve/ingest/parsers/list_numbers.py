"""Numbers of lists as words and signs: 4, iv, d, and characters of symbol fonts."""

from __future__ import annotations

_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl")),
    *((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)
_MOST_LETTERS = 30  # of a number: aaa... counts on


def list_number(number: int, form: str) -> str:
    """A number in a format of WordprocessingML (ST_NumberFormat); decimal for those that are not known."""
    kind = form.removeprefix("upper").removeprefix("lower")
    if kind == "Roman" and 0 < number < 4000:
        text = _roman(number)
    elif kind == "Letter" and 0 < number <= 26 * _MOST_LETTERS:
        text = chr(ord("a") + (number - 1) % 26) * ((number - 1) // 26 + 1)
    elif form == "decimalZero":
        return f"{number:02d}"
    elif form == "ordinal":
        ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 // 10 != 1 else "th"
        return f"{number}{ending}"
    else:
        return str(number)
    return text.upper() if form.startswith("upper") else text


def _roman(number: int) -> str:
    parts = []
    for value, letters in _ROMAN:
        parts.append(letters * (number // value))
        number %= value
    return "".join(parts)


def symbol(font: str, code: int) -> str | None:
    """The character that a symbol font shows for a code; None if it is not known.

    Such fonts have their signs at the codes of ASCII, or 0xF000 above.
    """
    place = code - 0xF000 if 0xF000 <= code <= 0xF0FF else code
    known = _FONTS.get(font.lower())
    if known is not None and place <= 0xFF:
        return known.get(place) or (chr(place) if known is _SYMBOL and 0x20 <= place < 0x40 else None)
    return chr(code) if not 0xE000 <= code <= 0xF8FF and code >= 0x20 else None


_SYMBOL = {
    **dict(zip(b"ABGDEZHQIKLMNXOPRSTUFCYW", "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ", strict=True)),
    **dict(zip(b"abgdezhqiklmnxoprstufcywVjJv", "αβγδεζηθικλμνξοπρστυφχψωςϕϑϖ", strict=True)),
    **dict(zip(b"\"$'@\\^", "∀∃∋≅∴⊥", strict=True)),
    **dict(zip(b"[]_{|}~-*", "[]_{|}∼−∗", strict=True)),
    **dict(enumerate("ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…", 0xA1)),
    **dict(enumerate("ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊⟨®©™∑", 0xC0)),
    0xF1: "⟩",
    0xF2: "∫",
}
_WINGDINGS = {
    0x22: "✂",
    0x28: "☎",
    0x2A: "✉",
    0x4A: "☺",
    0x4B: "😐",
    0x4C: "☹",
    0x6C: "●",
    0x6E: "■",
    0x6F: "□",
    0x71: "❑",
    0x72: "❒",
    0x75: "◆",
    0x76: "❖",
    0x77: "◆",
    0x9F: "•",
    0xA1: "○",
    0xA7: "▪",
    0xA8: "☐",
    0xAB: "★",
    0xD8: "➢",
    0xDF: "←",
    0xE0: "→",
    0xE1: "↑",
    0xE2: "↓",
    0xE8: "➔",
    0xEF: "⇦",
    0xF0: "⇨",
    0xF1: "⇧",
    0xF2: "⇩",
    0xF3: "⬄",
    0xFB: "✗",
    0xFC: "✓",
    0xFD: "☒",
    0xFE: "☑",
    **dict(enumerate("⓪①②③④⑤⑥⑦⑧⑨⑩⓿❶❷❸❹❺❻❼❽❾❿", 0x80)),
}
_WINGDINGS_2 = {0x4F: "✗", 0x50: "✓", 0x51: "☒", 0x52: "☑", 0x53: "☒", 0x54: "☒", 0xA3: "☐", 0x2A: "☐"}
_FONTS = {
    "symbol": _SYMBOL,
    "wingdings": _WINGDINGS,
    "wingdings 2": _WINGDINGS_2,
    "webdings": {0x61: "✓", 0x72: "✗", 0x63: "☐"},
}
