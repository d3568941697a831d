"""Picture of answer quality over the share of document tokens recomputed: a panel per set, a line per
strategy.

Drawn from the report of `ragserve eval` by ``scripts/readme-tables``, byte for byte the same each time. Needs
matplotlib, which only development installs."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest
from ragserve.strategy_spec import parse

SOURCE, PICTURE = "eval-h200.json", "eval-h200.svg"
SETS = ("crossdoc", "mid_crossdoc", "long_crossdoc")
MAX_SHARE = 52.0  # percent of the document tokens; beyond it reuse saves little
# told apart by colour-blind readers too
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666")
_MARKERS = "osD^vPX*"

# recomputed in percent, F1 in percent, standard error of its difference from full
Point = tuple[float, float, float]


def families(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Points by strategy, in order of the share. Options that are numbers vary along a line; other options,
    and zeros, make separate lines.

    ``concat`` without options, which recomputes nothing, is the first point of every line that keeps all
    tokens."""
    found: dict[str, list[Point]] = {}
    start: list[Point] = []
    for row in rows:
        [spec] = parse(row["strategy"])
        share = row["recomputed"]
        if spec.name in ("full", "prefix") or share is None or share > MAX_SHARE:
            continue
        point = (float(share), float(row["f1"]), float(row["f1_vs_full_se"] or 0.0))
        fixed = [
            f"{key}={value}"
            for key, value in sorted(spec.options.items())
            if isinstance(value, (str, bool)) or value == 0
        ]
        if spec.label == "concat":
            start = [point]
        else:
            found.setdefault(" ".join([spec.name, *fixed]), []).append(point)
    return {
        name: sorted(start + points if _keeps_all(rows, name) else points)
        for name, points in sorted(found.items())
    }


def _keeps_all(rows: Sequence[Mapping[str, Any]], family: str) -> bool:
    name = family.split()[0]
    return all((row["kept"] or 0) > 99.9 for row in rows if parse(row["strategy"])[0].name == name)


def draw(report: Mapping[str, Any], sets: Sequence[str] = SETS) -> str:
    """Draw the report's rows as SVG. Raises InvalidRequest if it has none of the sets."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = [
        (name, rows) for name in sets if (rows := [row for row in report["rows"] if row["set"] == name])
    ]
    if not panels:
        raise InvalidRequest(f"The report has none of the sets {', '.join(sets)}.")
    lines = [families(rows) for _, rows in panels]
    names = list(dict.fromkeys(name for each in lines for name in each))
    with mpl.rc_context(
        {
            "svg.hashsalt": "ragserve",
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (name, rows), curves in zip(axes, panels, lines, strict=True):
            for family, points in curves.items():
                number = names.index(family)
                shares, f1, errors = zip(*points, strict=True)
                # a colour that is used again gets another marker
                marker = _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)]
                style = {"color": _COLOURS[number % len(_COLOURS)], "marker": marker, "markersize": 4}
                axis.errorbar(shares, f1, yerr=errors, label=family, linewidth=1.4, elinewidth=0.6, **style)
            for row in rows:
                if row["strategy"] == "full":
                    axis.axhline(row["f1"], color="black", linestyle="--", linewidth=1, label="full")
            axis.set(
                title=f"{name} ({rows[0]['n']} questions)",
                xlabel="document tokens recomputed, %",
                xlim=(-1, MAX_SHARE),
            )
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("token F1, %")
        handles = dict(
            zip(*reversed([list(part) for part in axes[0].get_legend_handles_labels()]), strict=True)
        )
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def picture(results: Path) -> str | None:
    """Draw the picture of a results folder; None if it was not measured yet."""
    source = results / SOURCE
    return draw(json.loads(source.read_text(encoding="utf-8"))) if source.exists() else None
