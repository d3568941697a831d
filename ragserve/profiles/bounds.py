"""Confidence bounds of means over questions, on which the gate rests, and figures of whole answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIDENCE = 0.95
_TWO_SIDED = (1 + CONFIDENCE) / 2
_MARGIN = 2.0  # standard errors by which a default must be beaten
UPPER_BETS = ((0.98, 0.75), (0.9, 0.15), (0.7, 0.1))  # of the largest bet, and shares of the capital
PAIRED_BETS = ((0.95, 0.3), (0.5, 0.3), (0.2, 0.3), (0.08, 0.1))  # the same for paired differences
_BETS_AT = 0.05  # mean loss against which earlier losses size the bets
_FIRST_LOOK = 160  # answers, at the bound of KL; then at twice as many, and so on
_STEPS = 24  # of bisection


def upper_bound(values: Sequence[float], worst: float, *, among: int = 1) -> float:
    """The one-sided 95 % upper confidence bound of a loss's mean; of each of so many means (``among``), if
    they are to hold together: each has its part of the 5 % (Bonferroni).

    It is Student's t over the values and one more, ``worst``. Most losses are 0 and a few are large; a sample
    without a large one has no spread, and t alone would be certain of a mean of 0. With one more question
    that is lost, none lost of n gives 2.65 / n, near the exact bound of rare events, 3 / n. ``worst`` is the
    largest loss there can be or, where there is no limit, the largest of ``values``."""
    confidence = 1 - (1 - CONFIDENCE) / among
    return _mean_and_error([*values, worst], 1, confidence) if values else math.inf


def upper_bound_at_all_times(losses: Sequence[float]) -> float:
    """The one-sided 95 % upper confidence bound of the mean of losses from 0 to 1, valid at all times.

    It is the betting bound of Waudby-Smith and Ramdas (Estimating means of bounded random variables by
    betting, 2024, section 4) with a fixed mixture of bets u: against a mean of m or more, the capital

        K(m) = sum over (u, w) of w * product over losses x of (1 + u / (1 - m) * (m - x))

    is a non-negative supermartingale that begins at 1, so that by Ville's inequality it ever reaches 1 / 0.05
    with a probability of at most 5 %, whatever the distribution and whenever one looks. The bound is the
    least m at which K(m) is that high. A comparison may so be looked at after every question, ended as soon
    as the bound is low enough, and gone on with, without a correction. Without a loss it is 2 % after 157
    questions. The least that any valid bound takes is 149: a strategy that loses one answer of fifty loses
    none of 148 with a probability of 5 %."""
    import numpy as np

    values = np.asarray(losses, dtype=np.float64)
    low, high = 0.0, 1.0
    for _ in range(_STEPS if len(values) else 0):
        mean = (low + high) / 2
        bets = [(share / (1 - mean), weight) for share, weight in UPPER_BETS]
        low, high = (low, mean) if _refuted(mean - values, bets) else (mean, high)
    return high


def _refuted(gains: NDArray[np.float64], bets: Sequence[tuple[float, float]]) -> bool:
    """Whether the capital of constant bets on gains [questions], each with its share at the start, has become
    1 / 0.05."""
    import numpy as np

    capital = [math.log(weight) + float(np.log1p(bet * gains).sum()) for bet, weight in bets]
    return float(np.logaddexp.reduce(capital)) >= -math.log(1 - CONFIDENCE)


def margin_at_all_times(losses: Sequence[float], earlier: Sequence[float] = ()) -> float:
    """The one-sided 95 % upper confidence bound of the mean of paired losses from -1 to 1, valid at all
    times: the smallest loss that is excluded. Below 0, a gain of that much is shown.

    It is `upper_bound_at_all_times` on the other scale: against a mean loss of m or more, the capital of the
    bets u is the sum over (u, w) of w * product over losses x of (1 + u / (1 - m) * (m - x)). Where no answer
    changes, 5 points are excluded after 83 questions; where a tenth of them do, as often for the better as
    for the worse, each by three quarters of its score, after about 220, and 2 points after about 1,500.

    ``earlier`` losses, of questions that are not among these, prove nothing and divide the capital among the
    bets, as they would have multiplied it at 5 points: with 40 that change nothing, 71 questions instead
    of 83."""
    import numpy as np

    values, before = (np.asarray(each, dtype=np.float64) for each in (losses, earlier))
    shares = [
        weight * float(np.prod(1 + share / (1 - _BETS_AT) * (_BETS_AT - before)))
        for share, weight in PAIRED_BETS
    ]
    low, high = -1.0, 1.0
    for _ in range(_STEPS if len(values) else 0):
        mean = (low + high) / 2
        bets = [
            (share / (1 - mean), weight / sum(shares))
            for (share, _), weight in zip(PAIRED_BETS, shares, strict=True)
        ]
        low, high = (low, mean) if _refuted(mean - values, bets) else (mean, high)
    return high


def loses_at_all_times(losses: Sequence[float], limit: float) -> bool:
    """Tell whether paired losses from -1 to 1 show, at 95 % and at all times, a mean above ``limit``."""
    import numpy as np

    if not losses:
        return False
    bets = [(share / (1 + limit), weight) for share, weight in PAIRED_BETS]
    return _refuted(np.asarray(losses, dtype=np.float64) - limit, bets)


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


def answer_figures(rows: Iterable[Mapping[str, Any]], *, growing: bool = False) -> dict[str, Any]:
    """Means and bounds over the whole answers of rows that have ``answer_kl``, ``answer_agrees`` and
    ``answer_regret`` (shares), in nats and percent, as the gate has them. The bound of the regret is valid at
    all times; that of KL, which has no largest value, is for a sample whose size was chosen before. Where
    rows are ``growing`` and looked at again and again, it is the bound of `kl_bound_of_looks`."""
    compared = [row for row in rows if row.get("answer_kl") is not None]
    if not compared:
        names = ("answer_kl", "answer_kl_bound", "answer_agrees", "answer_regret", "answer_regret_bound")
        return dict.fromkeys(names)
    kls, regrets = [row["answer_kl"] for row in compared], [regret_of(row) for row in compared]
    return {
        "answer_kl": float(f"{math.fsum(kls) / len(kls):.3g}"),
        "answer_kl_bound": _shown(kl_bound_of_looks(kls) if growing else upper_bound(kls, max(kls))),
        "answer_agrees": round(100 * math.fsum(row["answer_agrees"] for row in compared) / len(compared), 2),
        "answer_regret": float(f"{100 * math.fsum(regrets) / len(regrets):.3g}"),
        "answer_regret_bound": round(100 * upper_bound_at_all_times(regrets), 2),
    }


def kl_bound_of_looks(kls: Sequence[float]) -> float | None:
    """The upper bound of a mean without a largest value, at the last of a few looks: after 160 values, 320,
    640, ... Each has half the error of the one before, so that all looks together err in 5 %. None before the
    first."""
    count, error = _FIRST_LOOK, (1 - CONFIDENCE) / 2
    if len(kls) < count:
        return None
    while 2 * count <= len(kls):
        count, error = 2 * count, error / 2
    seen = list(kls[:count])
    return _mean_and_error([*seen, max(seen)], 1, 1 - error)


def _shown(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def regret_of(row: Mapping[str, Any]) -> float:
    """A row's regret. Rows from before it was measured have the share of tokens without agreement, of which
    none has a larger regret than 1."""
    regret = row.get("answer_regret")
    return float(1 - row["answer_agrees"] if regret is None else regret)
