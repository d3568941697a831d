"""Pictures of an evaluation's report, as SVG elements without scripts, fonts or addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from ragserve.eval.judging import METRICS
from ragserve.eval.scoreboard import CAUSES, TIMES

_WIDTH, _LEFT, _RIGHT, _ROW = 790, 220, 30, 18
_COLOURS = 8  # classes c0 to c7 of the page's style
Line = Mapping[str, Any]


def scores(lines: Sequence[Line]) -> str | None:
    """The mean of each metric with its 95 % interval, for each strategy; None without a metric."""
    names = [name for name in METRICS if any(line[name] is not None for line in lines)]
    if not names:
        return None
    picture = _Picture("Scores with 95 % intervals, percent", len(names) * (len(lines) + 1), 100)
    for name in names:
        picture.label(METRICS[name], len(lines))
        for number, line in enumerate(lines):
            if line[name] is not None:
                low, high = line[f"{name}_95"]
                picture.whisker(number, low, high)
                picture.dot(
                    number, line[name], f"{line['strategy']}: {line[name]:.1f} [{low:.1f}, {high:.1f}]"
                )
            picture.down()
        picture.down()
    return picture.text()


def causes(lines: Sequence[Line]) -> str | None:
    """The share of answers that are right, read wrongly, not retrieved or failed; None without answers."""
    known = [line for line in lines if line["causes"]]
    if not known:
        return None
    picture = _Picture("What became of the questions, percent", 2 * len(known), 100)
    for line in known:
        picture.label(line["strategy"], 1)
        total, start = sum(line["causes"].values()), 0.0
        for number, cause in enumerate(CAUSES):
            share = 100 * line["causes"][cause] / total
            picture.bar(f"s{number}", start, start + share, f"{cause}: {line['causes'][cause]} of {total}")
            start += share
        picture.down(2)
    return picture.text()


def times(lines: Sequence[Line]) -> str | None:
    """Milliseconds by strategy: the middle half as a bar, the 5th to the 95th percentile as a line."""
    known = [(line, name) for name in TIMES for line in lines if line[name]]
    if not known:
        return None
    picture = _Picture("Milliseconds", 2 * len(known) + 1, max(line[name]["p95"] for line, name in known))
    for line, name in known:
        number, spread = lines.index(line), line[name]
        picture.label(f"{TIMES[name].split(',')[0]}, {line['strategy']}", 1)
        picture.whisker(number, spread["p5"], spread["p95"])
        told = ", ".join(f"{q}: {ms:,.0f} ms" for q, ms in spread.items())
        picture.bar(f"c{number % _COLOURS}", spread["p25"], spread["p75"], told)
        picture.dot(number, spread["p50"], told)
        picture.down(2)
    return picture.text()


def recall_curve(points: Sequence[tuple[float, float, float]]) -> str | None:
    """Recall over the number of passages, with its 95 % interval; None without points."""
    if not points:
        return None
    picture = _Picture("Recall by passages read, percent", len(points), 100)
    for k, (mean, low, high) in enumerate(points, 1):
        picture.label(f"first {k}" if k > 1 else "first passage", 1)
        picture.whisker(0, low, high)
        picture.dot(0, mean, f"recall@{k}: {mean:.1f} [{low:.1f}, {high:.1f}]")
        picture.down()
    return picture.text()


class _Picture:
    """Rows of marks over one axis from 0 to ``highest``."""

    def __init__(self, title: str, rows: int, highest: float) -> None:
        self._highest = highest or 1.0
        height = _ROW * (rows + 2)
        self._svg = ET.Element(
            "svg",
            {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "aria-label": title, "class": "chart"},
        )
        self._y = float(_ROW)
        for tick in _ticks(self._highest):
            at = f"{self._x(tick):.1f}"
            self._add("line", x1=at, x2=at, y1=str(_ROW // 2), y2=str(height - _ROW), **{"class": "grid"})
            text = self._add("text", x=at, y=str(height - 4), **{"class": "tick"})
            text.text = f"{tick:,.0f}"

    def down(self, rows: float = 1) -> None:
        self._y += rows * _ROW

    def label(self, text: str, rows: int) -> None:
        """Name the next ``rows`` rows."""
        at = self._y + (rows - 1) * _ROW / 2 + 4
        element = self._add("text", x=str(_LEFT - 12), y=f"{at:.1f}", **{"class": "label"})
        element.text = text if len(text) <= 28 else f"{text[:27]}…"
        self._told(element, text)

    def whisker(self, number: int, low: float, high: float) -> None:
        y = f"{self._y:.1f}"
        kind = f"whisker c{number % _COLOURS}"
        self._add("line", x1=f"{self._x(low):.1f}", x2=f"{self._x(high):.1f}", y1=y, y2=y, **{"class": kind})

    def dot(self, number: int, value: float, told: str) -> None:
        kind = f"dot c{number % _COLOURS}"
        dot = self._add("circle", cx=f"{self._x(value):.1f}", cy=f"{self._y:.1f}", r="4.5", **{"class": kind})
        self._told(dot, told)

    def bar(self, kind: str, low: float, high: float, told: str) -> None:
        left, width = self._x(low), max(0.0, self._x(high) - self._x(low))
        bar = self._add(
            "rect",
            x=f"{left:.1f}",
            width=f"{width:.1f}",
            y=f"{self._y - 6:.1f}",
            height="12",
            **{"class": f"bar {kind}"},
        )
        self._told(bar, told)

    def text(self) -> str:
        return ET.tostring(self._svg, encoding="unicode")

    def _x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(value, self._highest) / self._highest

    def _add(self, tag: str, **attributes: str) -> ET.Element:
        return ET.SubElement(self._svg, tag, attributes)

    @staticmethod
    def _told(element: ET.Element, text: str) -> None:
        ET.SubElement(element, "title").text = text


def _ticks(highest: float) -> Iterator[float]:
    """Five round numbers from 0 to near ``highest``."""
    step = 10 ** len(str(int(highest / 4))) / 10 if highest >= 4 else 1.0
    while highest / step > 5:
        step *= 2
    at = 0.0
    while at <= highest:
        yield at
        at += step
