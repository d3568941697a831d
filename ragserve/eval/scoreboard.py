"""Average the rows of an evaluation of one's own documents: a line a strategy, and the worst questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ragserve.eval.judging import METRICS, cause_of
from ragserve.profiles.bounds import interval
from ragserve.verification.report import percentile
from ragserve.verification.rows import Row

TIMES = {"ttft_ms": "First token, ms", "total_ms": "Whole answer, ms"}
SHOWN = (5, 25, 50, 75, 95)  # percentiles of times
CAUSES = ("right", "read wrongly", "not retrieved", "failed")
_BEST_OF = ("contains", "citation_recall", "recall", "f1", "citation_precision", "ndcg")


def lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each strategy, in order of first appearance: metrics and their 95 % intervals in percent, F1
    beside the first strategy's, where answers were lost, and milliseconds. A failed request counts as 0."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["strategy"], []).append(row)
    first = {_place(row): row for row in next(iter(groups.values()), [])}
    found = []
    for number, (strategy, group) in enumerate(groups.items()):
        line: dict[str, Any] = {"strategy": strategy, "questions": len(group)}
        line["failed"] = sum(bool(row["error"]) for row in group)
        for name in METRICS:
            line |= _mean_of(name, [row[name] for row in group if row[name] is not None])
        if number:
            line |= _difference(group, first)
        causes = [cause for row in group if (cause := cause_of(row))]
        line["causes"] = {cause: causes.count(cause) for cause in CAUSES} if causes else None
        for name in TIMES:
            values = [row[name] for row in group if not row["error"] and row[name] is not None]
            line[name] = {f"p{q}": round(percentile(values, q), 1) for q in SHOWN} if values else None
        found.append(line)
    return found


def worst(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """The questions with the worst answers, over all strategies, worst first: of each, its rows. Questions
    without a fault are left out."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(_place(row), []).append(row)
    scored = [(_merit(group), place) for place, group in groups.items()]
    return [groups[place] for merit, place in sorted(scored)[:count] if min(merit) < 1]


def recall_curve(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """Recall in percent at each cut-off from 1, with its interval, by the rows of one strategy."""
    ranks = [row["gold_ranks"] for row in rows if row.get("gold_ranks")]
    if not ranks:
        return []
    depth = max(len(row["passages"]) for row in rows)
    curve = []
    for k in range(1, depth + 1):
        shares = [sum(rank is not None and rank <= k for rank in each) / len(each) for each in ranks]
        low, high = interval(shares)
        curve.append((100 * math.fsum(shares) / len(shares), 100 * low, 100 * high))
    return curve


def _mean_of(name: str, values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {name: None, f"{name}_95": None, f"{name}_n": 0}
    low, high = interval(values)
    mean = math.fsum(values) / len(values)
    return {name: _percent(mean), f"{name}_95": [_percent(low), _percent(high)], f"{name}_n": len(values)}


def _difference(group: Sequence[Row], first: Mapping[tuple[str, str], Row]) -> dict[str, Any]:
    """F1 above the first strategy's, on the same questions."""
    pairs = [(row["f1"], first[_place(row)]["f1"]) for row in group if _place(row) in first]
    gains = [own - other for own, other in pairs if own is not None and other is not None]
    if not gains:
        return {"f1_vs_first": None, "f1_vs_first_95": None}
    low, high = interval(gains, -1.0, 1.0)
    return {
        "f1_vs_first": _percent(math.fsum(gains) / len(gains)),
        "f1_vs_first_95": [_percent(low), _percent(high)],
    }


def _merit(group: Sequence[Row]) -> tuple[float, ...]:
    """The means of the metrics by which questions are ordered; 1 for one that does not apply."""
    means = []
    for name in _BEST_OF:
        values = [row[name] for row in group if row[name] is not None]
        means.append(math.fsum(values) / len(values) if values else 1.0)
    return tuple(means)


def _place(row: Row) -> tuple[str, str]:
    return row["set"], row["id"]


def _percent(share: float) -> float:
    return round(100 * share, 1)
