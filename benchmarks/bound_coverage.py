"""How often the gate's bounds verify a strategy that is beyond the limit, and how many questions they take.

    python -m benchmarks.bound_coverage benchmarks/results/bound-coverage.json

Draws losses of whole answers (the regret a token) whose mean is exactly the limit, 2 %, from distributions of
different skew, and looks after every question from the 20th to the 400th, as an idle server and a run of
`ragserve tune` that is continued do. A bound of 95 % that is valid at all times errs in
at most 5 % of the comparisons. Then the same for strategies that lose little or nothing: after how many
questions they are verified. Needs no model; takes seconds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ragserve.profiles.bounds import CONFIDENCE, UPPER_BETS, upper_bound, upper_bound_at_all_times
from ragserve.verification import report

LIMIT, LOOKS, MOST = 0.02, 20, 400
Losses = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Losses]


def some(loss: float, share: float) -> Draw:
    """A share of the answers loses so much of its tokens, the others nothing."""
    return lambda draw, shape: loss * (draw.random(shape) < share)


BEYOND: dict[str, Draw] = {
    "1 answer of 50 loses all": some(1.0, 0.02),
    "1 of 25 half": some(0.5, 0.04),
    "4 of 25 an eighth": some(0.125, 0.16),
    "beta(0.02, 0.98)": lambda draw, shape: draw.beta(0.02, 0.98, shape),
}
WITHIN: dict[str, Draw] = {
    "nothing": some(0.0, 0.0),
    "1 answer of 100 an eighth": some(0.125, 0.01),
    "1 of 25 an eighth": some(0.125, 0.04),
    "1 of 50 a fifth": some(0.2, 0.02),
    "1 of 300 all": some(1.0, 1 / 300),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--comparisons", type=int, default=4000)
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    rows = []
    for name, losses in BEYOND.items():
        drawn = losses(draw, (given.comparisons, MOST))
        row: dict[str, object] = {"mean loss %": 2.0, "losses": name}
        for bound, verified in (("t", by_t(drawn)), ("at all times", at_all_times(drawn))):
            row[f"{bound}: ever verified %"] = round(100 * verified[:, LOOKS - 1 :].any(1).mean(), 1)
            row[f"{bound}: verified at 400 %"] = round(100 * verified[:, -1].mean(), 1)
        rows.append(row)
    for name, losses in WITHIN.items():
        drawn = losses(draw, (given.comparisons // 4, 4 * MOST))
        row = {"mean loss %": round(100 * float(drawn.mean()), 2), "losses": name}
        for bound, verified in (("t", by_t(drawn)), ("at all times", at_all_times(drawn))):
            first = np.where(verified.any(1), verified.argmax(1) + 1, 4 * MOST)
            row[f"{bound}: questions"] = int(np.median(first))
            row[f"{bound}: questions p90"] = int(np.quantile(first, 0.9))
        rows.append(row)
    report.write(
        "bound-coverage",
        {
            "limit": LIMIT,
            "comparisons": given.comparisons,
            "looks": f"after each question from {LOOKS} to {MOST}",
        },
        rows,
        out=given.out,
        note="t: Student's t over the losses and one total one, the bound until now. at all times: the "
        "betting bound of ragserve.profiles.bounds.",
    )
    return 0


def by_t(losses: Losses) -> NDArray[np.bool_]:
    """Whether `upper_bound` is at most the limit after each question [comparisons, questions]."""
    count = np.arange(2, losses.shape[1] + 2)
    mean = (losses.cumsum(1) + 1) / count
    spread = ((losses**2).cumsum(1) + 1 - count * mean**2) / (count - 1)
    bound = mean + stdtrit(count - 1, CONFIDENCE) * np.sqrt(np.maximum(spread, 0) / count)
    checked(losses, bound <= LIMIT, lambda values: upper_bound(values, 1.0))
    return np.asarray(bound <= LIMIT)


def at_all_times(losses: Losses) -> NDArray[np.bool_]:
    """The same of `upper_bound_at_all_times`, whose capital against the limit grows with each question."""
    capital = [
        np.log(weight) + np.log1p(share / (1 - LIMIT) * (LIMIT - losses)).cumsum(1)
        for share, weight in UPPER_BETS
    ]
    verified = np.logaddexp.reduce(capital) >= -np.log(1 - CONFIDENCE)
    checked(losses, verified, upper_bound_at_all_times)
    return np.asarray(verified)


def checked(losses: Losses, verified: NDArray[np.bool_], bound: Callable[[list[float]], float]) -> None:
    """Raise RuntimeError if the product's own bound says something else of a few comparisons."""
    for one, said in zip(losses[:3], verified, strict=False):
        for count in (150, 160, 300, MOST):
            found = bound(one[:count].tolist())
            if abs(found - LIMIT) > 1e-6 and (found <= LIMIT) != said[count - 1]:
                raise RuntimeError(f"after {count} questions the bound is {found}")


if __name__ == "__main__":
    raise SystemExit(main())
