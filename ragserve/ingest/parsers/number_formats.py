"""Numbers of cells as a reader of the workbook sees them, after ECMA-376 part 1, 18.8.30 and 18.8.31.

Dates with a day come out as ISO dates whatever their format: one that says 03/04/2024 does not tell which
number is the month. A format that is not understood leaves the stored number as it is.
"""

from __future__ import annotations

import datetime
import math
import re
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

BUILT_IN = {
    1: "0",
    2: "0.00",
    3: "#,##0",
    4: "#,##0.00",
    9: "0%",
    10: "0.00%",
    11: "0.00E+00",
    12: "# ?/?",
    13: "# ??/??",
    14: "yyyy-mm-dd",
    15: "d-mmm-yy",
    16: "d-mmm",
    17: "mmm-yy",
    18: "h:mm AM/PM",
    19: "h:mm:ss AM/PM",
    20: "h:mm",
    21: "h:mm:ss",
    22: "yyyy-mm-dd h:mm",
    37: "#,##0;(#,##0)",
    38: "#,##0;(#,##0)",
    39: "#,##0.00;(#,##0.00)",
    40: "#,##0.00;(#,##0.00)",
    45: "mm:ss",
    46: "[h]:mm:ss",
    47: "mm:ss.0",
    48: "##0.0E+0",
    49: "@",
    5: '"$"#,##0;-"$"#,##0',
    6: '"$"#,##0;-"$"#,##0',
    7: '"$"#,##0.00;-"$"#,##0.00',
    8: '"$"#,##0.00;-"$"#,##0.00',
    41: "#,##0",
    42: '"$"#,##0',
    43: "#,##0.00",
    44: '"$"#,##0.00',
    **dict.fromkeys((27, 36, 50, 52, 57), "yyyy-mm"),  # of East Asian workbooks
    **dict.fromkeys((28, 29, 30, 31, 51, 53, 54, 58), "yyyy-mm-dd"),
    **dict.fromkeys((32, 34, 55), "h:mm"),
    **dict.fromkeys((33, 35, 56), "h:mm:ss"),
}
"""Formats that a workbook names by number only."""

_TOKEN = re.compile(
    r'"(?P<quoted>[^"]*)"?|\\(?P<escaped>.)|_(?P<gap>.)|\*(?P<fill>.)|\[(?P<bracket>[^\[\]]*)\]'
    r"|(?P<ampm>AM/PM|A/P)|(?P<general>General)|(?P<exponent>E[+-])|(?P<date>y+|m+|d+|h+|s+|e+|b+|g+)"
    r"|(?P<digit>[0#?])|(?P<other>.)",
    re.I | re.S,
)
_CONDITION = re.compile(r"(<=|>=|<>|<|>|=)\s*(-?[\d.]+)")
_CURRENCY = re.compile(r"\$([^-]*)(-[0-9a-fA-F]+)?")
_ELAPSED = re.compile(r"h+|m+|s+", re.I)
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PLAIN = (-7, 21)  # exponents of numbers that are written without one


class Token(NamedTuple):
    """A part of a format: a literal, a placeholder of digits, or of a date."""

    kind: str
    text: str


def shown(stored: str, code: str, *, from_1904: bool = False) -> str:
    """The number that a cell stores as text, as its format ``code`` shows it."""
    number = plain_number(stored)
    try:
        value = Decimal(number)
        tokens, value, signed = _section(code, value)
        if tokens is None or not value.is_finite():
            return number
        if any(token.kind in ("date", "elapsed", "ampm") for token in tokens):
            return _date(value, tokens, from_1904) or number
        return _number(value, tokens, signed, number)
    except (InvalidOperation, ValueError, OverflowError, ArithmeticError):
        return number


def text_shown(text: str, code: str) -> str:
    """A cell's text: nothing if its format hides all."""
    parts = code.split(";")
    return "" if len(parts) == 4 and not parts[3].strip() else text


def plain_number(stored: str) -> str:
    """A stored number with the fifteen digits that a workbook keeps, without an exponent if it is short."""
    digits = stored.lstrip("-")
    if digits.isascii() and digits.isdigit():  # a whole number, of any length
        return stored
    try:
        value = Decimal(stored)
        if not value.is_finite():
            return stored
        value = Decimal(f"{value:.14e}").normalize()
    except (InvalidOperation, ValueError):
        return stored
    exponent = value.adjusted()
    if value == 0:
        return "0"
    return f"{value:f}" if _PLAIN[0] <= exponent < _PLAIN[1] else f"{value:E}"


def _section(code: str, value: Decimal) -> tuple[tuple[Token, ...] | None, Decimal, bool]:
    """The part of a format that holds for the value, the value for it, and whether it needs its own sign."""
    sections = _sections(code)
    conditions = [condition for condition, _ in sections]
    if any(conditions):
        for condition, tokens in sections:
            if condition is None or _holds(condition, value):
                return tokens, value, True
        return None, value, True
    numeric = sections[:3] if len(sections) > 3 else sections
    if value < 0 and len(numeric) > 1:
        return numeric[1][1], -value, False
    if value == 0 and len(numeric) > 2:
        return numeric[2][1], value, True
    return numeric[0][1], value, True


@lru_cache(1000)
def _sections(code: str) -> tuple[tuple[tuple[str, Decimal] | None, tuple[Token, ...]], ...]:
    found: list[tuple[tuple[str, Decimal] | None, tuple[Token, ...]]] = []
    condition: tuple[str, Decimal] | None = None
    tokens: list[Token] = []
    for match in _TOKEN.finditer(code[:1000]):
        kind, text = match.lastgroup or "", match.group(match.lastgroup or 0)
        if kind == "bracket":
            if compared := _CONDITION.fullmatch(text):
                condition = compared[1], Decimal(compared[2])
            elif _ELAPSED.fullmatch(text):
                tokens.append(Token("elapsed", text.lower()))
            elif currency := _CURRENCY.fullmatch(text):
                tokens.append(Token("literal", currency[1]))
        elif kind == "other" and text == ";":
            found.append((condition, tuple(tokens)))
            condition, tokens = None, []
        elif kind in ("quoted", "escaped"):
            tokens.append(Token("literal", text))
        elif kind == "gap":
            tokens.append(Token("literal", " "))
        elif kind != "fill":
            tokens.append(Token(kind, text))
    found.append((condition, tuple(tokens)))
    return tuple((each, _settled(part)) for each, part in found)


def _settled(tokens: list[Token] | tuple[Token, ...]) -> tuple[Token, ...]:
    """The tokens of a section; letters of dates beside places for digits are units, as in ``0.00 EUR``.

    Raises ``ValueError`` for a date with letters that mean nothing.
    """
    dated = [token.text[0].lower() for token in tokens if token.kind in ("date", "elapsed")]
    if dated and "s" not in dated and any(token.kind == "digit" for token in tokens):
        return tuple(Token("literal", t.text) if t.kind in ("date", "exponent") else t for t in tokens)
    if dated and any(t.kind == "other" and t.text.isalpha() and t.text not in "TZtz" for t in tokens):
        raise ValueError("an unknown format of dates")
    return tuple(tokens)


def _holds(condition: tuple[str, Decimal], value: Decimal) -> bool:
    sign, limit = condition
    equal = value == limit
    return {"=": equal, "<>": not equal}.get(
        sign, (value < limit if "<" in sign else value > limit) or (equal and "=" in sign)
    )


def _number(value: Decimal, tokens: tuple[Token, ...], signed: bool, number: str) -> str:
    if not any(token.kind in ("digit", "general") or token.text == "@" for token in tokens):
        text = "".join(token.text for token in tokens).strip()  # words for the number, or none to hide it
        return f"-{text}" if text and signed and value < 0 else text
    negative = signed and value < 0
    value = abs(value)
    texts = [token.text for token in tokens]
    digits = [at for at, token in enumerate(tokens) if token.kind == "digit"]
    if not digits:
        whole = "".join(
            plain_number(str(value)) if t.kind == "general" or t.text == "@" else t.text for t in tokens
        )
    elif any(t.kind == "other" and t.text == "/" for t in tokens):
        whole = _fraction(value, tokens, digits)
    else:
        whole = _decimal(value, tokens, digits, texts)
    whole = " ".join(whole.split())
    # of a number that was rounded to nothing, Excel shows no sign
    return f"-{whole}" if negative and re.search("[1-9]", whole) else whole


def _decimal(value: Decimal, tokens: tuple[Token, ...], digits: list[int], texts: list[str]) -> str:
    percents = sum(token.kind == "other" and token.text == "%" for token in tokens)
    value = value.scaleb(2 * percents)
    first, last = digits[0], digits[-1]
    exponent = next((at for at, token in enumerate(tokens) if token.kind == "exponent"), None)
    mantissa_end = exponent if exponent is not None else last + 1
    point = next((at for at in range(mantissa_end) if _is(tokens[at], ".")), None)
    whole_end = point if point is not None else mantissa_end
    whole_places = [at for at in digits if at < whole_end]
    parts_places = [at for at in digits if whole_end < at < mantissa_end]
    after = max(digits[: len(whole_places)], default=first)
    # commas between digits group thousands; those behind the last digit before the point divide by them
    grouped = any(_is(tokens[at], ",") for at in range(first, after))
    scaled = 0
    for end in {after, max(parts_places, default=after)}:
        while end + 1 < len(tokens) and _is(tokens[end + 1], ","):
            end += 1
            scaled += 1
    value = value.scaleb(-3 * scaled)
    power = 0
    if exponent is not None and value:
        step = max(1, len(whole_places))
        power = value.adjusted() // step * step if step > 1 else value.adjusted()
        value = value.scaleb(-power)
    value = value.quantize(Decimal(1).scaleb(-len(parts_places)), ROUND_HALF_UP)
    whole, _, parts = f"{value:f}".partition(".")
    while parts and len(parts_places) >= len(parts) and texts[parts_places[len(parts) - 1]] != "0":
        if parts[-1] != "0":
            break
        parts = parts[:-1]
    whole = _padded(whole.lstrip("0"), tokens, whole_places, whole_end, grouped, first)
    out = ["".join(texts[at] for at in range(first) if not _is(tokens[at], ",")), whole]
    if point is not None and (parts or any(texts[at] == "0" for at in parts_places) or not parts_places):
        out.append("." if parts_places else "")
        out += _within(parts, tokens, whole_end + 1, mantissa_end)
    if exponent is not None:
        sign = "-" if power < 0 else "+" if "+" in texts[exponent] else ""
        out.append(f"E{sign}{abs(power):0{sum(at > exponent for at in digits)}d}")
    out += [texts[at] for at in range(last + 1, len(tokens)) if not _is(tokens[at], ",")]
    return "".join(out)


def _padded(
    whole: str, tokens: tuple[Token, ...], places: list[int], end: int, grouped: bool, first: int
) -> str:
    """Digits before the point, with zeros and literals between them, as of a telephone number."""
    wanted = sum(tokens[at].text == "0" for at in places)
    leading = next((n for n, at in enumerate(places) if tokens[at].text == "0"), len(places))
    whole = whole.zfill(len(places) - leading) if wanted else whole
    if grouped:
        head = len(whole) % 3
        parts = [whole[:head]] if head else []
        return ",".join(parts + [whole[at : at + 3] for at in range(head, len(whole), 3)])
    inside = [at for at in range(first, end) if tokens[at].kind != "digit" and not _is(tokens[at], ",")]
    inside = [at for at in inside if places and places[0] < at < places[-1]]
    if not inside:
        return whole
    out: list[str] = []
    rest = whole
    for at in range(places[-1], first - 1, -1):
        if tokens[at].kind == "digit":
            if at == places[0]:
                out.append(rest)
            elif rest:
                out.append(rest[-1])
                rest = rest[:-1]
        elif rest or at > first:
            out.append(tokens[at].text)
    return "".join(reversed(out))


def _within(parts: str, tokens: tuple[Token, ...], start: int, end: int) -> list[str]:
    out, rest = [], parts
    for at in range(start, end):
        if tokens[at].kind == "digit":
            out.append(rest[:1])
            rest = rest[1:]
        elif not _is(tokens[at], ","):
            out.append(tokens[at].text)
    return out


def _fraction(value: Decimal, tokens: tuple[Token, ...], digits: list[int]) -> str:
    slash = next(at for at, token in enumerate(tokens) if _is(token, "/"))
    above = slash - 1
    while above in digits:
        above -= 1
    separate = any(at <= above for at in digits)  # a place for the whole number
    rest = "".join(token.text for token in tokens[slash + 1 :])
    fixed = re.match(r"[1-9]\d{0,8}", rest.lstrip())
    exact = Fraction(value)
    if fixed:
        below = int(fixed[0])
        part = Fraction(round(exact * below), below)
        over = round(exact * below)
    else:
        most = 10 ** sum(at > slash for at in digits) - 1
        part = exact.limit_denominator(max(1, most))
        over, below = part.numerator, part.denominator
    if not separate:
        return f"{over}/{below}"
    whole, over = divmod(over, below)
    if not over:
        return str(whole)
    return f"{whole} {over}/{below}" if whole else f"{over}/{below}"


def _date(value: Decimal, tokens: tuple[Token, ...], from_1904: bool) -> str:
    """A date, a time or a duration; empty if the value is none."""
    seconds_places = _fraction_places(tokens)
    step = Decimal(1).scaleb(-seconds_places)
    total = (value * 86400).quantize(step, ROUND_HALF_UP)
    if any(token.kind == "elapsed" for token in tokens):
        return _elapsed(total, tokens)
    days = math.floor(total / 86400)
    rest = total - days * 86400
    letters = [t.text.lower() for t in _minutes(tokens) if t.kind == "date"]
    clock = any(text[0] in "hsn" for text in letters)
    dated = any(text[0] in "ymdeg" for text in letters)
    time = _clock(rest, letters, seconds_places) if clock else ""
    if not dated:
        return time
    day = _day(days, from_1904)
    if day is None:
        return time
    if any(text in ("d", "dd") for text in letters) and any(text[0] == "m" for text in letters):
        return f"{day.isoformat()} {time}".strip()
    return " ".join("".join(_part(t, day, time) for t in _minutes(tokens)).split())


def _day(days: int, from_1904: bool) -> datetime.date | None:
    if from_1904:
        days += 1462
    if days == 0:
        return None  # a time of day in a format for dates
    # Excel takes 1900 for a leap year, and shows no days before it, which other programs write
    start = datetime.date(1899, 12, 31) if 0 < days < 60 else datetime.date(1899, 12, 30)
    return start + datetime.timedelta(days=days)


def _part(token: Token, day: datetime.date, time: str) -> str:
    text = token.text.lower()
    if token.kind == "ampm":
        return ""
    if token.kind != "date":
        return token.text
    if text[0] in "ye":
        return f"{day.year:04d}"
    if text[0] == "m":
        name = _MONTHS[day.month - 1]
        return {1: str(day.month), 2: f"{day.month:02d}", 3: name[:3], 5: name[0]}.get(len(text), name)
    if text[0] == "d":
        name = _DAYS[day.weekday()]
        return {1: str(day.day), 2: f"{day.day:02d}", 3: name[:3]}.get(len(text), name)
    return time if text[0] == "h" else ""


def _minutes(tokens: tuple[Token, ...]) -> list[Token]:
    """The tokens, with minutes as ``n``: m beside hours or seconds."""
    dates = [at for at, token in enumerate(tokens) if token.kind in ("date", "elapsed")]
    out = list(tokens)
    for place, at in enumerate(dates):
        if tokens[at].text[0] not in "mM" or len(tokens[at].text) > 2:
            continue
        before = tokens[dates[place - 1]].text[0].lower() if place else ""
        after = tokens[dates[place + 1]].text[0].lower() if place + 1 < len(dates) else ""
        if before == "h" or after == "s":
            out[at] = Token(tokens[at].kind, "n" * len(tokens[at].text))
    return out


def _clock(seconds: Decimal, letters: list[str], places: int) -> str:
    whole = int(seconds)
    text = f"{whole // 3600:02d}:{whole // 60 % 60:02d}"
    if not any(letter[0] == "h" for letter in letters):
        text = f"{whole // 60:02d}"
    if any(letter[0] == "s" for letter in letters):
        text += f":{whole % 60:02d}"
        if places:
            text += f"{seconds % 1:.{places}f}"[1:]
    return text


def _elapsed(total: Decimal, tokens: tuple[Token, ...]) -> str:
    negative, total = total < 0, abs(total)
    out, units = [], {"h": 3600, "n": 60, "m": 60, "s": 1}
    skipping = False
    for token in _minutes(tokens):
        unit = units.get(token.text[:1].lower())
        if token.kind == "elapsed" and unit:
            out.append(f"{int(total) // unit:0{len(token.text)}d}")
            total -= int(total) // unit * unit
        elif token.kind == "date" and unit:
            out.append(f"{int(total) // unit:0{max(2, len(token.text))}d}")
            total -= int(total) // unit * unit
        elif token.kind == "digit" and skipping:
            out.append(f"{total % 1:f}"[2:])
            skipping = False
        elif token.kind not in ("date", "digit"):
            out.append(token.text)
        skipping = skipping or token.text == "."
    return ("-" if negative else "") + "".join(out).strip()


def _fraction_places(tokens: tuple[Token, ...]) -> int:
    """Places behind the point of seconds."""
    return sum(token.kind == "digit" for token in tokens)


def _is(token: Token, text: str) -> bool:
    return token.kind == "other" and token.text == text
