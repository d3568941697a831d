"""How soon a strategy leaves `auto` when its answers differ from full prefill's more often than they did when
it was verified, or stand more often in no passage although full prefill's do, and how often without a change.

    python -m benchmarks.changes_in_use benchmarks/results/changes-in-use.json

Draws answers that differ with some probability; a fifth of these are unsupported. The rates that are recorded
are themselves drawn, from as many probes as a verdict takes. After 500 answers at those rates one changes:
that of different answers to twice as much, or ten points more, with none of the new ones unsupported; or both
by ten points. Needs no model; takes three minutes."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ragserve.profiles.in_use import (
    ALARM,
    LOWEST,
    UNSUPPORTED,
    InUse,
    RecordedRates,
    higher_rates,
    recorded_rate,
)
from ragserve.verification import report

RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4)
BEFORE, AFTER, LONG = 500, 4000, 20_000
PART = 5  # of different answers one is unsupported
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
NOTE = (
    "rate: of different answers, before the change. recorded over: probes of the verdict; the rate recorded "
    "is an estimate. alarm after: answers after the change until the strategy is out, median and 90th "
    "percentile; in time: percent of the runs within 200 (twice the rate) or 400 answers (ten points more; "
    "unsupported: those, too). false: alarms in 20,000 answers without a change, the mean; known: where the "
    "rates are recorded exactly."
)


def statistics(happened: Bools, recorded: Floats) -> Floats:
    """The mean statistic of one kind after each answer [runs, answers], by the rates recorded [runs]."""
    rates = np.array([higher_rates(rate) for rate in recorded])
    if_so, if_not = rates / recorded[:, None], (1 - rates) / (1 - recorded)[:, None]
    r = np.zeros_like(rates)
    found = np.empty(happened.shape)
    for number in range(happened.shape[1]):
        r = (1 + r) * np.where(happened[:, number, None], if_so, if_not)
        found[:, number] = r.mean(1)
        r = np.minimum(r, 1e12)
    return found


def risen(differ: Bools, alone: Bools, recorded: Floats, alone_recorded: Floats) -> Floats:
    """The statistic of `InUse` of both kinds."""
    both = statistics(differ, recorded), statistics(alone, alone_recorded)
    return (1 - UNSUPPORTED) * both[0] + UNSUPPORTED * both[1]


def checked(differ: Bools, alone: Bools, recorded: RecordedRates, found: Floats) -> None:
    """Raise RuntimeError if the product says something else."""
    one = InUse("e")
    for number, each in enumerate(zip(differ[:300], alone[:300], strict=True)):
        one = one.with_answer(bool(each[0]), bool(each[1]), recorded)
        if not one.out and not math.isclose(one.risen, found[number], rel_tol=1e-6):
            raise RuntimeError(f"after {number} answers {one.risen}, not {found[number]}")


def drawn(
    rate: float, alone: float, runs: int, answers: int, draw: np.random.Generator
) -> tuple[Bools, Bools]:
    """Answers that differ, and of these the unsupported ones [runs, answers]."""
    values = draw.random((runs, answers))
    return values < rate, values < alone


def row(rate: float, probes: int, runs: int, draw: np.random.Generator) -> dict[str, Any]:
    shares, alone_shares = (draw.binomial(probes, each, runs) / probes for each in (rate, rate / PART))
    recorded, alone_recorded = (
        np.array([recorded_rate(share, probes) for share in each]) for each in (shares, alone_shares)
    )
    made: dict[str, Any] = {"rate %": 100 * rate, "recorded over": probes}
    changes = {
        "twice": (2 * rate, rate / PART, 200),
        "+10 points": (rate + 0.1, rate / PART, 400),
        "unsupported": (rate + 0.1, rate / PART + 0.1, 400),
    }
    for name, (higher, alone, limit) in changes.items():
        before = drawn(rate, rate / PART, runs, BEFORE, draw)
        after = drawn(higher, alone, runs, AFTER, draw)
        differ, unsupported = (np.concatenate(each, 1) for each in zip(before, after, strict=True))
        found = risen(differ, unsupported, recorded, alone_recorded)
        known = RecordedRates((float(shares[0]), probes), (float(alone_shares[0]), probes))
        checked(differ[0], unsupported[0], known, found[0])
        out = found >= ALARM
        soon = ~out[:, :BEFORE].any(1)  # the others had left before
        first = np.where(out.any(1), out.argmax(1) - BEFORE + 1, AFTER)[soon]
        made |= {
            f"{name}: alarm after": int(np.median(first)),
            f"{name}: p90": int(np.quantile(first, 0.9)),
            f"{name}: in time %": round(100 * float((first <= limit).mean()), 1),
        }
    calm = drawn(rate, rate / PART, runs, LONG, draw)
    made["false"] = alarms(risen(*calm, recorded, alone_recorded))
    exact = (np.full(runs, max(each, LOWEST)) for each in (rate, rate / PART))
    made["false known"] = alarms(risen(*calm, *exact))
    return made


def alarms(found: Floats) -> float:
    """Mean alarms of a run: as many as a constant rate of them gives that leaves so many runs without."""
    without = 1 - float((found >= ALARM).any(1).mean())
    return round(-math.log(max(without, 1 / len(found))), 2)


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
