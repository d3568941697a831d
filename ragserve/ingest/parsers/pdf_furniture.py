"""Running heads, running feet and page numbers: lines that a document's pages repeat."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from ragserve.ingest.parsers.list_numbers import list_number

_EDGE = 3  # lines at the top and at the bottom of a page that may be such
_FEWEST, _SHARE = 3, 0.6  # pages that repeat a line: at least, and of those with text
_LONGEST = 120  # characters
_NUMBER = re.compile(r"\d+")
_WORDS = (
    r"(?:page|p\.|pg\.?|seite|s\.|p[aá]gina|pag\.|side|sida|sivu|strona|str\.|страница|стр\.|oldal|sayfa)"
)
_OF = r"(?:of|/|\||von|de|sur|di|av|af|van|z|ze|из|från|\()"
_PAGE_OF = re.compile(
    rf"\A[-–—|\[( ]{{0,3}}(?:{_WORDS} ?)?(\d{{1,4}}) ?{_OF} ?(\d{{1,4}})[-–—|\]) ]{{0,3}}\Z", re.I
)
# a number at an end of a line, behind a mark or a word for pages, or before a mark or the number of all pages
_APART = re.compile(
    rf"(?:(?<=[-–—|•·/])|(?<=[-–—|•·/] )|\b{_WORDS} ?)(\d{{1,4}})(?= ?[-–—|•·/]| ?{_OF} ?\d|\Z)"
    rf"|\A(\d{{1,4}})(?= ?[-–—|•·])",
    re.I,
)
_PAGE = re.compile(rf"\A[-–—|\[( ]{{0,3}}{_WORDS} ?(\d{{1,4}})[-–—|\]) ]{{0,3}}\Z", re.I)
_ROMAN_PAGE = re.compile(
    rf"\A[-–—|\[( ]{{0,3}}({_WORDS} ?)?([ivxlc]{{1,12}})(?: ?{_OF} ?([ivxlc]{{1,12}}|\d{{1,4}}))?"
    r"[-–—|\]) ]{0,3}\Z",
    re.I,
)
_ROMAN = {list_number(value, "lowerRoman"): value for value in range(1, 400)}
_CAPITALS = "\0I"  # begins the shape of a line that is nothing but a Roman number in capitals


def without_furniture(pages: list[str]) -> list[str]:
    """Pages without what they repeat: heads stay on the first page, feet on the last, numbers of pages
    nowhere.

    A line is repeated if most pages, or most of the left or right ones, have it, at the top or at the bottom,
    with no other digits than those that count the pages.
    """
    split = [[line for line in page.split("\n") if line.strip()] for page in pages]
    n_pages = sum(map(bool, split))
    heads = _repeated([lines[:_EDGE] for lines in split], n_pages)
    heads = {shape for shape in heads if not shape.startswith(_CAPITALS)}  # those number sections
    feet = _repeated([lines[: -_EDGE - 1 : -1] for lines in split], n_pages)
    out: list[str] = []
    kept_heads: set[str] = set()
    left_feet: dict[str, str] = {}
    for number, lines in enumerate(split, 1):
        gone: set[int] = set()
        above: list[str] = []
        for at in _edge(lines, heads, number, len(pages), forwards=True):
            shape = _shape(" ".join(lines[at].split()), number)
            gone.add(at)
            told = _is_number(lines[at]) or _counts(lines[at], number, len(pages))
            if shape in heads and shape not in kept_heads and not told:
                kept_heads.add(shape)
                above.append(lines[at])
        for at in _edge(lines, feet, number, len(pages), forwards=False):
            if at not in gone and (shape := _shape(" ".join(lines[at].split()), number)) in feet:
                left_feet.pop(shape, None)  # the last page's, in its order
                told = _is_number(lines[at]) or _counts(lines[at], number, len(pages))
                left_feet[shape] = "" if told else lines[at]
            gone.add(at)
        body = [line for at, line in enumerate(lines) if at not in gone]
        out.append("\n".join([*above, *body]) if gone else pages[number - 1])
    kept = [line for shape, line in left_feet.items() if line and shape not in kept_heads]
    if kept:
        last = max((at for at, page in enumerate(out) if page.strip()), default=len(out) - 1)
        out[last] = "\n".join([out[last].rstrip(), *reversed(kept)]).strip()
    return out


def _repeated(edges: list[list[str]], n_pages: int) -> set[str]:
    """The shapes of the lines that enough of the pages have at an edge, or of the left or the right ones: in
    many books their heads differ."""
    found: set[str] = set()
    if n_pages < _FEWEST:
        return found
    shapes = [_shapes([" ".join(line.split()) for line in lines], at) for at, lines in enumerate(edges, 1)]
    for first, step in ((0, 1), (0, 2), (1, 2)):
        counts = Counter(shape for page in shapes[first::step] for shape in page)
        fewest = max(_FEWEST, _SHARE * n_pages / step)
        found.update(shape for shape, n in counts.items() if n >= fewest)
    # Roman numbers are often those of a few pages: they have to count up from page to page
    counting = Counter(shape for before, page in pairwise(shapes) for shape in before & page)
    found.update(
        shape for shape, n in counting.items() if n >= _FEWEST - 1 and shape[:2].lower() == _CAPITALS.lower()
    )
    return found


def _shapes(lines: list[str], number: int) -> set[str]:
    """The shapes of a page's lines, of numbers also as those that count from another page on."""
    found = {_shape(line, number) for line in lines if len(line) <= _LONGEST}
    found |= {_offset_shape(line, number) for line in lines if _NUMBER.fullmatch(line)}
    return found | {_roman_shape(line, number) for line in lines if _roman(line)[0]}


def _shape(line: str, number: int) -> str:
    """A line with a sign for the page's number, where that stands by itself."""
    return _APART.sub(lambda found: "\0" if str(number) in found.groups() else found.group(), line)


def _offset_shape(line: str, number: int) -> str:
    return f"\0{int(line) - number:+d}"


def _roman_shape(line: str, number: int) -> str:
    alone = line.isalpha() and line.isupper()
    return f"{_CAPITALS if alone else _CAPITALS.lower()}{_roman(line)[0] - number:+d}"


def _roman(line: str) -> tuple[int, int, bool]:
    """Of a line that is nothing but a Roman number: that, the number of all pages behind it, and whether a
    word for pages stands before it. Zeros where there is none."""
    found = _ROMAN_PAGE.match(line)
    if found is None or not (found.group(2).islower() or found.group(2).isupper()):
        return 0, 0, False
    of = found.group(3) or "0"
    total = int(of) if of.isdecimal() else _ROMAN.get(of.lower(), 0)
    if found.group(3) and not total:
        return 0, 0, False
    return _ROMAN.get(found.group(2).lower(), 0), total, found.group(1) is not None


def _edge(lines: list[str], shapes: set[str], number: int, n_pages: int, *, forwards: bool) -> list[int]:
    """Places of the repeated lines at an edge, those beyond other lines left out."""
    order = list(range(len(lines)))[:_EDGE] if forwards else list(range(len(lines)))[: -_EDGE - 1 : -1]
    found: list[int] = []
    for at in order:
        line = " ".join(lines[at].split())
        repeated = bool(shapes) and not shapes.isdisjoint(_shapes([line], number))
        if not (repeated or _counts(line, number, n_pages)):
            break
        found.append(at)
    return found


def _counts(line: str, number: int, n_pages: int) -> bool:
    """Return whether a line is nothing but the number of its page."""
    line = " ".join(line.split())
    if found := _PAGE_OF.match(line):
        return int(found.group(1)) == number and int(found.group(2)) == n_pages
    if found := _PAGE.match(line):
        return int(found.group(1)) == number
    roman, total, named = _roman(line)
    return roman == number and (total == n_pages if total else named)


def _is_number(line: str) -> bool:
    return line.strip("-–—|[]() ").isdigit()
