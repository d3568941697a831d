"""Confidence bounds of means over questions, on which the gate rests, and figures of whole answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CONFIDENCE = 0.95
_TWO_SIDED = (1 + CONFIDENCE) / 2
_MARGIN = 2.0  # standard errors by which a default must be beaten


def upper_bound(values: Sequence[float], worst: float) -> float:
    """The one-sided 95 % upper confidence bound of a loss's mean.

    It is Student's t over the values and one more, ``worst``. Most losses are 0 and a few are large; a sample
    without a large one has no spread, and t alone would be certain of a mean of 0. With one more question
    that is lost, none lost of n gives 2.65 / n, near the exact bound of rare events, 3 / n. ``worst`` is the
    largest loss there can be or, where there is no limit, the largest of ``values``."""
    return _mean_and_error([*values, worst], 1) if values else math.inf


def lower_bound(values: Sequence[float]) -> float:
    """The one-sided 95 % lower confidence bound of a loss's mean: as `upper_bound`, with one more question
    that loses nothing, so that no single answer shows a loss; 0 without values."""
    return max(0.0, _mean_and_error([*values, 0.0], -1)) if values else 0.0


def interval(values: Sequence[float], lowest: float = 0.0, highest: float = 1.0) -> tuple[float, float]:
    """The two-sided 95 % confidence interval of the mean of values between ``lowest`` and ``highest``, of
    which there must be some: as `upper_bound` on both sides, so that a few equal values are not certain."""
    low = _mean_and_error([*values, lowest], -1, _TWO_SIDED)
    return max(lowest, low), min(highest, _mean_and_error([*values, highest], 1, _TWO_SIDED))


def better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Tell whether ``one`` is higher by more than `_MARGIN` standard errors of the mean difference, question
    by question."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("inf")
    return statistics.fmean(differences) > max(_MARGIN * error, 1e-9)


def _mean_and_error(values: Sequence[float], sign: int, confidence: float = CONFIDENCE) -> float:
    """The mean, and ``sign`` times what Student's t allows it to be off."""
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean + sign * float(stdtrit(n - 1, confidence)) * math.sqrt(spread / n)


def answer_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means and bounds over the whole answers of rows that have ``answer_kl`` and ``answer_agrees`` (a
    share), in nats and percent, as the gate has them."""
    pairs = [(row["answer_kl"], row["answer_agrees"]) for row in rows if row.get("answer_kl") is not None]
    if not pairs:
        names = ("answer_kl", "answer_kl_bound", "answer_agrees", "answer_agrees_bound")
        return dict.fromkeys(names)
    kls, lost = [kl for kl, _ in pairs], [1 - agrees for _, agrees in pairs]
    return {
        "answer_kl": float(f"{math.fsum(kls) / len(kls):.3g}"),
        "answer_kl_bound": float(f"{upper_bound(kls, max(kls)):.3g}"),
        "answer_agrees": round(100 * (1 - math.fsum(lost) / len(lost)), 2),
        "answer_agrees_bound": round(100 * (1 - upper_bound(lost, 1.0)), 2),
    }
