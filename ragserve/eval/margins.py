"""The recovered margin: the share of what plain reuse loses that a strategy gets back.

    margin = (F1 - F1 of concat) / (F1 of full - F1 of concat)

A ratio of small differences means nothing, so only sets count on which `concat` loses enough; their questions
are pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragserve.profiles.bounds import CONFIDENCE

FULL, REUSED = "full", "concat"
LEAST_MARGIN = 5.0
"""Points of F1 that `concat` must lose on a set."""
_RESAMPLES = 2_000
_Scores = Mapping[tuple[str, str], float]


def margins(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Margins by strategy, in percent (``margin``), their 95 % intervals (``margin_95``) and how many sets
    count (``margin_sets``). A strategy's questions are those asked under `full` and `concat`, too; without a
    set that counts it is left out. Failed questions count as wrong."""
    scores: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        scores.setdefault(row["strategy"], {})[row["set"], row["id"]] = row["f1"]
    if FULL not in scores or REUSED not in scores:
        return {}
    return {
        strategy: found
        for strategy, own in scores.items()
        if (found := _margin(own, scores[FULL], scores[REUSED])) is not None
    }


def _margin(own: _Scores, full: _Scores, reused: _Scores) -> dict[str, Any] | None:
    by_set: dict[str, list[tuple[float, float]]] = {}  # gained and lost, over concat
    for place in own.keys() & full.keys() & reused.keys():
        pair = own[place] - reused[place], full[place] - reused[place]
        by_set.setdefault(place[0], []).append(pair)
    sets = [np.array(sorted(by_set[name])) for name in sorted(by_set)]
    counted = [pairs for pairs in sets if 100 * pairs[:, 1].mean() >= LEAST_MARGIN]
    if not counted:
        return None
    gained, lost = sum(pairs.sum(0) for pairs in counted)
    low, high = _bootstrapped(counted)
    return {
        "margin": round(100 * float(gained / lost), 1),
        "margin_95": [round(100 * low, 1), round(100 * high, 1)],
        "margin_sets": len(counted),
    }


def _bootstrapped(sets: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """The percentile interval of the ratio of both sums over ``sets``, each [questions, 2]; questions are
    drawn within their set. The same at every call."""
    draw = np.random.default_rng(0)
    sums = np.zeros((_RESAMPLES, 2))
    for pairs in sets:
        for number in range(_RESAMPLES):
            sums[number] += pairs[draw.integers(len(pairs), size=len(pairs))].sum(0)
    ratios = sums[sums[:, 1] > 0]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios[:, 0] / ratios[:, 1], [tail, 1 - tail])
    return float(low), float(high)
