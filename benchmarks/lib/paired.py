"""Paired differences of answers' scores, sets counting alike whatever their number of questions."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping
from typing import Any

Scores = Mapping[tuple[str, Any], float]
"""Points by set and question."""


def difference(own: Scores, reference: Scores) -> dict[str, Any]:
    """Mean difference over the questions that both have, half the width of its 95 % interval (normal), and
    the difference of each set."""
    by_set: dict[str, list[float]] = collections.defaultdict(list)
    for key, value in own.items():
        if key in reference:
            by_set[key[0]].append(value - reference[key])
    mean = statistics.fmean(map(statistics.fmean, by_set.values()))
    error = sum(statistics.pvariance(x) / len(x) for x in by_set.values()) ** 0.5 / len(by_set)
    each = {name: round(statistics.fmean(x), 1) for name, x in sorted(by_set.items())}
    return {"difference": round(mean, 1), "interval": round(1.96 * error, 1), **each}
