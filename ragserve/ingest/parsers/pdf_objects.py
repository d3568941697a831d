"""Text of a PDF's page by its objects: what no reader sees is removed, raised and lowered text is marked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ragserve.ingest.parsers.small_text import lowered, raised_behind

_INVISIBLE = 3  # text render mode; OCR programs write what they recognise so, over the image
_FILLED = (0, 4)  # modes that paint with the fill colour alone
_WHITE, _CLEAR = 250, 5  # of 255: components of white at least, alpha of invisible text at most
_TINY = 1.0  # points
_SMALL, _SMALLEST = 0.85, 0.4  # size of raised and lowered text, of the text before it
_MOST_CHARS = 24  # of bytes: raised text is short
_COLOUR = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()  # PDFium writes it there
_COLOUR_AT = tuple(map(ctypes.byref, _COLOUR))
_DEPTH = 8  # of forms within forms


_Box = tuple[float, float, float, float]  # left, bottom, right, top
_Object = tuple[Any, int, Any]  # what PDFium calls it, its type, the form that it is in


class _Text(NamedTuple):
    """A text object: where its baseline begins, and its size in points."""

    raw: Any
    form: Any
    x: float
    y: float
    size: float
    upright: bool


class _Script(NamedTuple):
    """Raised or lowered text: the objects, and the text object before them."""

    raw: list[Any]
    base: _Text
    raised: bool


def page_text(page: Any, *, hidden: bool = False) -> tuple[str, int]:
    """The text of a page, and the number of its passages that no reader sees; they are left out, unless they
    are asked for. Changes the page in memory."""
    box = page.get_bbox()
    texts, n_hidden = _visible(page, box, keep=hidden)
    sizes = [text.size for text in texts]
    scripts = list(_scripts(texts)) if sizes and min(sizes) <= _SMALL * max(sizes) else []
    textpage = page.get_textpage()
    if scripts:
        return _with_scripts(textpage, texts, scripts), n_hidden
    rows = len({text.y for text in texts}) < len(texts)
    return (_bounded if rows else _within)(textpage, box), n_hidden


def _bounded(textpage: Any, box: _Box) -> str:
    """The text within the page's borders, with a blank where PDFium ends a line between texts of one height,
    as in a table's row: its own function for text within borders leaves out such ends, which glues the texts.
    """
    text = _within(textpage, box)
    lines = textpage.get_text_range().split("\r\n")
    if len(lines) == text.count("\r\n") + 1 or "".join(lines) != text.replace("\r\n", ""):
        return text
    parts, at = [lines[0]], len(lines[0])
    for line in lines[1:]:
        ends = text.startswith("\r\n", at)
        parts += ["\r\n" if ends else " ", line]
        at += len(line) + 2 * ends
    return "".join(parts)


def _within(textpage: Any, box: _Box) -> str:
    """pypdfium2's ``get_text_bounded``, which has the text made twice, first for its length."""
    import pypdfium2.raw as pdfium

    left, bottom, right, top = box
    size = 2 * textpage.count_chars() + 64
    while True:
        buffer = (ctypes.c_ushort * size)()
        n_units = pdfium.FPDFText_GetBoundedText(textpage, left, top, right, bottom, buffer, size)
        if n_units < size:
            return bytes(memoryview(buffer)[:n_units]).decode("utf-16-le", "ignore").rstrip("\0")
        size *= 2


def _objects(page: Any) -> list[_Object]:
    """All objects of a page in the order of painting, those of its forms behind the form."""
    import pypdfium2.raw as pdfium

    get, type_of, form = pdfium.FPDFPage_GetObject, pdfium.FPDFPageObj_GetType, pdfium.FPDF_PAGEOBJ_FORM
    found: list[_Object] = []
    for at in range(pdfium.FPDFPage_CountObjects(page)):
        raw = get(page, at)
        kind = type_of(raw)
        found.append((raw, kind, None))
        if kind == form:
            found += _objects_of(raw)
    return found


def _objects_of(form: Any, depth: int = 1) -> Iterator[_Object]:
    import pypdfium2.raw as pdfium

    for at in range(pdfium.FPDFFormObj_CountObjects(form)):
        raw = pdfium.FPDFFormObj_GetObject(form, at)
        kind = pdfium.FPDFPageObj_GetType(raw)
        yield raw, kind, form
        if kind == pdfium.FPDF_PAGEOBJ_FORM and depth < _DEPTH:
            yield from _objects_of(raw, depth + 1)


def _visible(page: Any, box: _Box, *, keep: bool) -> tuple[list[_Text], int]:
    """Remove hidden text objects. Returns the others of the page, and the number of runs removed."""
    import pypdfium2.raw as pdfium

    every = _objects(page.raw)
    backgrounds = _Backgrounds(every)
    left, bottom, right, top = box
    matrix, size = pdfium.FS_MATRIX(), ctypes.c_float()
    matrix_at, size_at = ctypes.byref(matrix), ctypes.byref(size)
    get_matrix, get_size = pdfium.FPDFPageObj_GetMatrix, pdfium.FPDFTextObj_GetFontSize
    get_mode, get_fill = pdfium.FPDFTextObj_GetTextRenderMode, pdfium.FPDFPageObj_GetFillColor
    text_kind, (red, green, blue, alpha) = pdfium.FPDF_PAGEOBJ_TEXT, _COLOUR
    texts: list[_Text] = []
    n_runs, in_run = 0, False
    for place, (raw, kind, form) in enumerate(every):
        if kind != text_kind:
            continue
        get_matrix(raw, matrix_at)
        get_size(raw, size_at)
        b, c, d, x, y = matrix.b, matrix.c, matrix.d, matrix.e, matrix.f
        points = abs(size.value) * (abs(d) if c == 0 else (c**2 + d**2) ** 0.5)
        suspect = form is None and (points < _TINY or not (left <= x <= right and bottom <= y <= top))
        # most text is painted in a colour that white paper shows
        painted = get_mode(raw) in _FILLED and get_fill(raw, *_COLOUR_AT) and alpha.value > _CLEAR
        dark = painted and (red.value < _WHITE or green.value < _WHITE or blue.value < _WHITE)
        unseen = not dark and backgrounds.hide(raw, form, place)
        if unseen or (suspect and _is_lost(raw, box)):
            n_runs, in_run = n_runs + (not in_run), True
            if not keep:
                if form is None:
                    pdfium.FPDFPage_RemoveObject(page.raw, raw)
                else:
                    pdfium.FPDFFormObj_RemoveObject(form, raw)
                continue
        else:
            in_run = False
        texts.append(_Text(raw, form, x, y, points, b == c == 0 and form is None))
    return texts, n_runs


class _Backgrounds:
    """What is painted on a page behind its text; looked at when a text asks for it, on few pages."""

    def __init__(self, every: list[_Object]) -> None:
        self._every = every

    def hide(self, raw: Any, form: Any, place: int) -> bool:
        """Return whether text is invisible, not over an image, or as white as what was painted before it."""
        import pypdfium2.raw as pdfium

        mode = pdfium.FPDFTextObj_GetTextRenderMode(raw)
        if mode == _INVISIBLE:
            return not self._images.is_behind(raw, form, len(self._every))
        if mode not in _FILLED:
            return False
        colour, alpha = _fill(raw)
        return alpha <= _CLEAR or (min(colour) >= _WHITE and not self._coloured.is_behind(raw, form, place))

    @cached_property
    def _images(self) -> _Areas:
        import pypdfium2.raw as pdfium

        image, objects = pdfium.FPDF_PAGEOBJ_IMAGE, enumerate(self._every)
        return _Areas([(place, raw, form) for place, (raw, kind, form) in objects if kind == image])

    @cached_property
    def _coloured(self) -> _Areas:
        objects = enumerate(self._every)
        return _Areas([(place, raw, form) for place, (raw, kind, form) in objects if _is_coloured(raw, kind)])


class _Areas:
    """The places of objects."""

    def __init__(self, objects: list[tuple[int, Any, Any]]) -> None:
        self._bounds = np.array([_bounds(raw) for _, raw, _ in objects], np.float32).reshape(-1, 4)
        self._places = np.array([place for place, _, _ in objects], np.int64)
        self._forms = np.array([_address(form) for _, _, form in objects], np.uint64)

    def is_behind(self, raw: Any, form: Any, before: int) -> bool:
        """Return whether an object that was painted before place ``before`` is behind the middle of a text.
        Forms have coordinates of their own, so those of another form count as being there."""
        left, bottom, right, top = _bounds(raw)
        x, y = (left + right) / 2, (bottom + top) / 2
        own = self._bounds
        here = (own[:, 0] <= x) & (x <= own[:, 2]) & (own[:, 1] <= y) & (y <= own[:, 3])
        elsewhere = self._forms != np.uint64(_address(form))
        return bool(((here | elsewhere) & (self._places < before)).any())


def _fill(raw: Any) -> tuple[tuple[int, int, int], int]:
    """Red, green and blue, and the alpha value, of 255."""
    import pypdfium2.raw as pdfium

    if not pdfium.FPDFPageObj_GetFillColor(raw, *_COLOUR_AT):
        return (0, 0, 0), 255
    red, green, blue, alpha = _COLOUR
    return (red.value, green.value, blue.value), alpha.value


def _is_coloured(raw: Any, kind: int) -> bool:
    """Return whether white text can be read on an object."""
    import pypdfium2.raw as pdfium

    if kind != pdfium.FPDF_PAGEOBJ_PATH:
        return kind in (pdfium.FPDF_PAGEOBJ_IMAGE, pdfium.FPDF_PAGEOBJ_SHADING)
    fill, stroke = ctypes.c_int(), ctypes.c_int()
    pdfium.FPDFPath_GetDrawMode(raw, fill, stroke)
    colour, alpha = _fill(raw)
    return fill.value != pdfium.FPDF_FILLMODE_NONE and min(colour) < _WHITE and alpha > _CLEAR


def _bounds(raw: Any) -> _Box:
    import pypdfium2.raw as pdfium

    sides = [ctypes.c_float() for _ in range(4)]
    pdfium.FPDFPageObj_GetBounds(raw, *sides)
    left, bottom, right, top = (side.value for side in sides)
    return left, bottom, right, top


def _is_lost(raw: Any, paper: _Box) -> bool:
    """Return whether text is too small to be seen, or beside the page."""
    left, bottom, right, top = _bounds(raw)
    if left == right and bottom == top:  # of blanks
        return False
    beside = right <= paper[0] or left >= paper[2] or top <= paper[1] or bottom >= paper[3]
    return beside or min(right - left, top - bottom) < _TINY


def _scripts(texts: list[_Text]) -> Iterator[_Script]:
    """Yield the text that is smaller than the text right before it, and higher or lower."""
    base: _Text | None = None
    script: _Script | None = None
    for text in texts:
        if base is None or not text.upright or not base.upright:
            base, script = text, None
            continue
        raised = _level(base, text)
        if raised is None or not _is_short(text.raw):
            base = text
        elif script is not None and script.raised == raised and _adjoins(script.raw[-1], text, base):
            script.raw.append(text.raw)
            continue
        elif _adjoins(base.raw, text, base):
            if script is not None:
                yield script
            script = _Script([text.raw], base, raised)
            continue
        else:
            base = text
        if script is not None:
            yield script
        script = None
    if script is not None:
        yield script


def _level(base: _Text, text: _Text) -> bool | None:
    """Whether ``text`` is raised beside ``base`` (True) or lowered (False); None if it is neither."""
    up = (text.y - base.y) / max(base.size, 1e-3)
    if not _SMALLEST * base.size <= text.size <= _SMALL * base.size:
        return None
    if 0.15 <= up <= 0.8:
        return True
    return False if -0.5 <= up <= -0.08 else None


def _adjoins(before: Any, text: _Text, base: _Text) -> bool:
    gap = _bounds(text.raw)[0] - _bounds(before)[2]
    return -0.15 * base.size <= gap <= 0.35 * base.size


def _is_short(raw: Any) -> bool:
    left, _, right, _ = _bounds(raw)
    _, bottom, _, top = _bounds(raw)
    return right - left <= _MOST_CHARS / 3 * max(top - bottom, 1.0)


def _with_scripts(textpage: Any, texts: list[_Text], scripts: list[_Script]) -> str:
    """The page's text with its raised and lowered parts marked, on the line that they belong to."""
    import pypdfium2.raw as pdfium

    owners: dict[int, int] = {_address(raw): n for n, script in enumerate(scripts) for raw in script.raw}
    lines = {_address(text.raw): text for text in texts}
    spans: list[list[int]] = []  # script, first character, end
    n_chars = textpage.count_chars()
    objects = [_address(pdfium.FPDFText_GetTextObject(textpage, at)) for at in range(n_chars)]
    for at, address in enumerate(objects):
        number = owners.get(address)
        if number is None:
            continue
        if spans and spans[-1][0] == number and not any(objects[spans[-1][2] : at]):
            spans[-1][2] = at + 1
        else:
            spans.append([number, at, at + 1])
    out, done = "", 0
    for number, start, end in spans:
        script = scripts[number]
        out += _range(textpage, done, start)
        before = out.rstrip("\r\n")
        inner = _range(textpage, start, end)
        out = before + (raised_behind(before, inner) if script.raised else lowered(inner))
        done = end
        following = next((at for at in range(end, n_chars) if objects[at]), n_chars)
        if following < n_chars and (after := lines.get(objects[following])):
            same_line = abs(after.y - script.base.y) < 0.1 * script.base.size
            if same_line and after.x >= script.base.x:
                gap = _range(textpage, end, following)
                out += " " if gap.strip("\r\n") else ""
                done = following
    return out + _range(textpage, done, n_chars)


def _address(raw: Any) -> int:
    return ctypes.cast(raw, ctypes.c_void_p).value or 0 if raw else 0


def _range(textpage: Any, start: int, end: int) -> str:
    text: str = textpage.get_text_range(start, end - start) if end > start else ""
    return text
