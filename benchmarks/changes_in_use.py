"""How soon a strategy leaves `auto` when its answers differ from full prefill's more often than they did when
it was verified, and how often without a change.

    python -m benchmarks.changes_in_use benchmarks/results/changes-in-use.json

Draws answers that differ with some probability. The rate that is recorded is itself drawn, from as many
probes as a verdict takes. After 500 answers at that rate it changes: to twice as much, or ten points more.
Needs no model; takes a minute."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ragserve.profiles.in_use import ALARM, InUse, higher_rates, recorded_rate
from ragserve.verification import report

RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4)
BEFORE, AFTER, LONG = 500, 4000, 20_000
Floats = npt.NDArray[np.float64]
NOTE = (
    "rate: of different answers, before the change. recorded over: probes of the verdict; the rate recorded "
    "is an estimate. alarm after: answers after the change until the strategy is out, median and 90th "
    "percentile; in time: percent of the runs within 200 (twice the rate) or 400 answers (ten points more). "
    "false: alarms in 20,000 answers without a change, the mean; known: where the rate is recorded exactly."
)


def statistics(differ: npt.NDArray[np.bool_], recorded: Floats) -> Floats:
    """The statistic of `InUse` after each answer [runs, answers], by the rates recorded [runs]."""
    rates = np.array([higher_rates(rate) for rate in recorded])
    if_differs, if_not = rates / recorded[:, None], (1 - rates) / (1 - recorded)[:, None]
    r = np.zeros_like(rates)
    found = np.empty(differ.shape)
    for number in range(differ.shape[1]):
        r = (1 + r) * np.where(differ[:, number, None], if_differs, if_not)
        found[:, number] = r.mean(1)
        r = np.minimum(r, 1e12)
    return found


def checked(differ: npt.NDArray[np.bool_], recorded: tuple[float, int], found: Floats) -> None:
    """Raise RuntimeError if the product says something else."""
    one = InUse("e")
    for number, each in enumerate(differ[:300]):
        one = one.with_answer(bool(each), recorded)
        if not one.out and not math.isclose(
            sum(one.statistics) / len(one.statistics), found[number], rel_tol=1e-6
        ):
            raise RuntimeError(f"after {number} answers {one.statistics}, not {found[number]}")


def row(rate: float, probes: int, runs: int, draw: np.random.Generator) -> dict[str, Any]:
    shares = draw.binomial(probes, rate, runs) / probes
    recorded = np.array([recorded_rate(share, probes) for share in shares])
    made: dict[str, Any] = {"rate %": 100 * rate, "recorded over": probes}
    for name, higher, limit in (("twice", 2 * rate, 200), ("+10 points", rate + 0.1, 400)):
        before = draw.random((runs, BEFORE)) < rate
        after = draw.random((runs, AFTER)) < higher
        differ = np.concatenate([before, after], 1)
        found = statistics(differ, recorded)
        checked(differ[0], (float(shares[0]), probes), found[0])
        out = found >= ALARM
        soon = ~out[:, :BEFORE].any(1)  # the others had left before
        first = np.where(out.any(1), out.argmax(1) - BEFORE + 1, AFTER)[soon]
        made |= {
            f"{name}: alarm after": int(np.median(first)),
            f"{name}: p90": int(np.quantile(first, 0.9)),
            f"{name}: in time %": round(100 * float((first <= limit).mean()), 1),
        }
    calm = draw.random((runs, LONG)) < rate
    made["false"] = alarms(calm, recorded)
    made["false known"] = alarms(calm, np.full(runs, max(rate, 0.02)))
    return made


def alarms(calm: npt.NDArray[np.bool_], recorded: Floats) -> float:
    """Mean alarms of a run: as many as a constant rate of them gives that leaves so many runs without."""
    without = 1 - float((statistics(calm, recorded) >= ALARM).any(1).mean())
    return round(-math.log(max(without, 1 / len(calm))), 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    rows = [row(rate, probes, given.runs, draw) for probes in (350, 1900) for rate in RATES]
    workload = {"runs": given.runs, "alarm": ALARM, "answers before the change": BEFORE}
    report.write("changes-in-use", workload, rows, out=given.out, note=NOTE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
