"""Charts and diagrams of Office files as text: titles, and the values that are kept for drawing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers.base import one_line
from ragserve.ingest.parsers.number_formats import shown
from ragserve.ingest.parsers.ooxml import Package, as_int, drawing_text

_C = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"
_X = "{http://schemas.microsoft.com/office/drawing/2014/chartex}"
_AXES = (f"{_C}catAx", f"{_C}valAx", f"{_C}dateAx", f"{_C}serAx")
_NAMES = ("cat", "xVal")
_VALUES = ("val", "yVal", "bubbleSize")


def related_text(package: Package, part: str, *, values: bool = True) -> Iterator[str]:
    """Yield the texts of the charts and diagrams that a part, such as a slide, refers to, in their order."""
    for relation in package.relations(part):
        if not relation.external:
            text = linked_text(package, relation.kind, relation.target, values=values)
            if text:
                yield text


def linked_text(package: Package, kind: str, target: str, *, values: bool = True) -> str:
    """The text of a chart or a diagram; empty for parts of other kinds."""
    if kind not in ("chart", "chartEx", "diagramData"):
        return ""
    root = package.optional_xml(target)
    if root is None:
        return ""
    return drawing_text(root) if kind == "diagramData" else chart_text(root, values=values)


def chart_text(root: Any, *, values: bool = True) -> str:
    """The titles of a chart and its axes, and with ``values`` a table of its categories and series."""
    title = _title(root.find(f".//{_C}chart")) or _title(root.find(f".//{_X}chart"))
    axes = [text for axis in root.iter(*_AXES) if (text := _title(axis))]
    heads = [f"Chart: {title}" if title else "", f"Axes: {', '.join(axes)}" if axes else ""]
    table = markdown_table(_rows(root)) if values else ""
    return "\n\n".join(filter(None, ["\n".join(filter(None, heads)), table]))


def _title(node: Any | None) -> str:
    title = None if node is None else next(iter(node.iterchildren(f"{_C}title", f"{_X}title")), None)
    if title is None:
        return ""
    cached = " ".join(v.text or "" for v in title.iter(f"{_C}v"))
    return one_line(drawing_text(title) or cached)


def _rows(root: Any) -> list[list[str]]:
    """A row per category and a column per series, if the series have the same categories."""
    series = [(_name(node), _points(node, _NAMES), _points(node, _VALUES)) for node in root.iter(f"{_C}ser")]
    series = [each for each in series if each[2]]
    if not series:
        return []
    names = [[at.get(n, "") for n in sorted(at.keys() | values.keys())] for _, at, values in series]
    if all(own == names[0] for own in names):
        places = sorted(series[0][1].keys() | series[0][2].keys())
        labels = series[0][1]
        rows = [[labels.get(n, ""), *(values.get(n, "") for *_, values in series)] for n in places]
        return [["", *(name for name, *_ in series)], *rows]
    return [
        ["series", "category", "value"],
        *([name, at.get(n, ""), value] for name, at, values in series for n, value in sorted(values.items())),
    ]


def _name(series: Any) -> str:
    text = series.find(f"{_C}tx")
    return "" if text is None else one_line(" ".join(v.text or "" for v in text.iter(f"{_C}v")))


def _points(series: Any, tags: tuple[str, ...]) -> dict[int, str]:
    """The texts of a series' names or values, by their places; names of several levels are joined."""
    found: dict[int, str] = {}
    for source in (each for tag in tags for each in series.iterchildren(f"{_C}{tag}")):
        levels = list(source.iter(f"{_C}lvl")) or [source]
        code = source.findtext(f".//{_C}formatCode") or "General"
        for level in reversed(levels):
            for point in level.iter(f"{_C}pt"):
                at, text = as_int(point.get("idx")), point.findtext(f"{_C}v") or ""
                if source.find(f".//{_C}numCache") is not None or source.find(f"{_C}numLit") is not None:
                    text = shown(text, point.get("formatCode") or code)
                found[at] = f"{found[at]}, {text}" if at in found else text
    return found
