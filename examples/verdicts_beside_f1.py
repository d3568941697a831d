"""Verdicts without labels beside those by F1, by the means of evaluations (`ragserve eval` or gpu_eval.py).

    python examples/verdicts_beside_f1.py OUT.json EVAL.json [EVAL.json ...]

All evaluations must be of one model and precision. A set that several of them have is taken from the
first. So few questions decide nothing by their bounds, so the means are held against the gate's limits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ragserve.measuring import report
from ragserve.profiles.gate import MAX_ANSWER_KL, MAX_F1_LOSS, MAX_KL, MAX_REGRET

NOTE = (
    "f1_vs_full: points above full on the same questions. kl: of the first token, answer_kl, answer_agrees, "
    "answer_regret: a token over the whole answer of full (nats, percent). passes: by the means. f1: at most "
    f"{MAX_F1_LOSS:g} points below full; regret: at most {MAX_ANSWER_KL:g} nats a token and {MAX_REGRET:g} % "
    f"of regret, the rule without labels; agreement: the rule before, {MAX_ANSWER_KL:g} nats and 98 % of the "
    f"tokens; first token: at most {MAX_KL:g} nats there, the rule of version 1."
)
SAME = ("model", "device", "attention", "dtype", "max_new_tokens", "decoding")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("evaluations", type=Path, nargs="+")
    given = parser.parse_args()
    found = [json.loads(path.read_text()) for path in given.evaluations]
    first = found[0]
    if any(each["workload"][name] != first["workload"][name] for each in found for name in SAME):
        parser.error("the evaluations are not of one model and precision")
    rows, taken = [], set[str]()
    for each in found:
        sets = {row["set"] for row in each["rows"]} - taken
        taken |= sets
        rows += [judged(row) for row in each["rows"] if row["set"] in sets and row["strategy"] != "full"]
    agree = sum(row["f1_passes"] == row["regret_passes"] for row in rows)
    print(f"{agree} of {len(rows)} verdicts by the regret agree with those by F1")
    workload = {name: first["workload"][name] for name in SAME}
    report.write(
        "verdicts", workload, rows, out=given.out, note=NOTE, ran_on=first["environment"], shown=SHOWN
    )


SHOWN = ("set", "strategy", "n", "f1_vs_full", "answer_kl", "answer_regret", "f1_passes", "regret_passes")


def judged(row: dict[str, Any]) -> dict[str, Any]:
    close = row["answer_kl"] <= MAX_ANSWER_KL
    return row | {
        "f1_passes": row["f1_vs_full"] >= -MAX_F1_LOSS,
        "regret_passes": close and row["answer_regret"] <= MAX_REGRET,
        "agreement_passes": close and row["answer_agrees"] >= 98,
        "first_token_passes": row["kl"] <= MAX_KL,
    }


if __name__ == "__main__":
    main()
