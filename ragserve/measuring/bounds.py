"""Confidence bounds of means over questions, on which the gate rests."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95


def upper_bound(values: Sequence[float], worst: float) -> float:
    """The one-sided 95 % upper confidence bound of a loss's mean.

    It is Student's t over the values and one more, ``worst``. Most losses are 0 and a few are large; a sample
    without a large one has no spread, and t alone would be certain of a mean of 0. With one more question
    that is lost, none lost of n gives 2.65 / n, near the exact bound of rare events, 3 / n. ``worst`` is the
    largest loss there can be or, where there is no limit, the largest of ``values``."""
    from scipy.special import stdtrit

    if not values:
        return math.inf
    n = len(values) + 1
    mean = (math.fsum(values) + worst) / n
    spread = (math.fsum((value - mean) ** 2 for value in values) + (worst - mean) ** 2) / (n - 1)
    return mean + float(stdtrit(n - 1, CONFIDENCE)) * math.sqrt(spread / n)
