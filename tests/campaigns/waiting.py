"""What waiting times of the tenants' campaign tell: whether one learns by them what others have cached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

SIGMAS = 5.0  # of the mean difference of two waiting times, from which on it is no chance
PAIRS, MANY_PAIRS = 12, 100  # of waiting times, before they are judged, and before their noise is
SEEN = 0.5  # largest share of what one's own cached prompt saves that may be too small to be seen


def judged(waits: Mapping[str, list[float]]) -> dict[str, Any]:
    """Mean waiting times by case, and their difference in standard errors; our own cached prompt shows that
    the difference would be seen."""
    theirs, nobody, own = (waits.get(name, []) for name in ("theirs", "nobody", "own"))
    if len(own) < PAIRS:
        return {}
    saved, (difference, error) = paired(own, nobody)[0], paired(theirs, nobody)
    hidden = {}
    if len(cold := waits.get("hidden cold", [])) >= PAIRS:
        gap, noise = paired(waits["hidden cached"], cold)
        hidden = {"sigmas, a hidden document's text cached": round(gap / noise, 2)}
    return {
        **hidden,
        "pairs": len(own),
        "ttft ms, theirs cached": round(sum(theirs) / len(theirs), 2),
        "ttft ms, nobody's": round(sum(nobody) / len(nobody), 2),
        "ttft ms, ours cached": round(sum(own) / len(own), 2),
        "sigmas, theirs against nobody's": round(difference / error, 2),
        "a leak is seen from, of ours": round(SIGMAS * error / saved, 3) if saved > 0 else None,
    }


def fault(figures: Mapping[str, Any]) -> str | None:
    """Say what is wrong with figures: they tell of others, or too little to tell anything."""
    if any(abs(value) > SIGMAS for name, value in figures.items() if name.startswith("sigmas")):
        return f"the waiting time tells what others have cached: {figures}"
    seen = figures.get("a leak is seen from, of ours")
    if figures.get("pairs", 0) >= MANY_PAIRS and (seen is None or seen > SEEN):
        return f"waiting times are too noisy to tell anything: {figures}"
    return None


def paired(a: list[float], b: list[float]) -> tuple[float, float]:
    """Mean of the paired differences b - a, and its standard error."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
