"""The HTML report of an evaluation: one file, without scripts and without anything from another address."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.eval import charts
from ragserve.eval.judging import METRICS
from ragserve.eval.scoreboard import CAUSES, TIMES, recall_curve, worst
from ragserve.verification.rows import Row

_TEMPLATE = Path(__file__).with_name("report.html")
_WORST = 20
# What XML, and so a strict reader, forbids; a document may hold it.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def page(report: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The report of ``rows``, whose averages are ``report["rows"]``."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    lines = report["rows"]
    first = [row for row in rows if lines and row["strategy"] == lines[0]["strategy"]]
    pictures = {
        "Scores": charts.scores(lines),
        "What became of the questions": charts.causes(lines),
        "Recall by passages read": charts.recall_curve(recall_curve(first)),
        "Time": charts.times(lines),
    }
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        lines=lines,
        metrics=METRICS,
        times=TIMES,
        causes=CAUSES,
        # ElementTree has escaped them.
        pictures={name: Markup(_printable(svg)) for name, svg in pictures.items() if svg},
        worst=worst(rows, _WORST),
    )
    return text + "\n"


def _printable(value: Any) -> Any:
    """A text without what no page may hold; markup stays markup."""
    return type(value)(_FORBIDDEN.sub("\ufffd", value)) if isinstance(value, str) else value
