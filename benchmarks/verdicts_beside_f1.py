"""Verdicts without labels beside those by F1, by the means of evaluations (`ragserve eval` or gpu_eval.py).

    python -m benchmarks.verdicts_beside_f1 OUT.json EVAL.json [EVAL.json ...] [--by-set SUMMARY.json]

All evaluations must be of one model and precision. A strategy that several of them have of a set is taken
from the first. So few questions decide nothing by their bounds, so the means are held against the limits of
the gate."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragserve.profiles.figures import MAX_ANSWER_KL, MAX_F1_LOSS, MAX_KL, MAX_REGRET
from ragserve.verification import report

NOTE = (
    "f1_vs_full: points above full on the same questions. kl: of the first token, answer_kl, answer_agrees, "
    "answer_regret: a token over the whole answer of full (nats, percent). passes: by the means. f1: at most "
    f"{MAX_F1_LOSS:g} points below full; regret: at most {MAX_ANSWER_KL:g} nats a token and {MAX_REGRET:g} % "
    f"of regret, the rule without labels; agreement: the rule before, {MAX_ANSWER_KL:g} nats and 98 % of the "
    f"tokens; first token: at most {MAX_KL:g} nats there, the rule of version 1."
)
ONE_SIDED = 1.645  # standard errors, 95 %
NOTE_BY_SET = (
    f"Verdicts by the means. F1 passes: at most {MAX_F1_LOSS:g} points below full; without labels: at most "
    f"{MAX_ANSWER_KL:g} nats a token and {MAX_REGRET:g} % of regret. F1 surely lower: more than "
    f"{MAX_F1_LOSS:g} points below full at 95 % confidence."
)
SAME = ("model", "device", "attention", "dtype", "max_new_tokens", "decoding")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("evaluations", type=Path, nargs="+")
    parser.add_argument("--by-set", type=Path, help="file for the numbers of verdicts, set by set")
    given = parser.parse_args()
    found = [json.loads(path.read_text()) for path in given.evaluations]
    first = found[0]
    if any(each["workload"][name] != first["workload"][name] for each in found for name in SAME):
        parser.error("the evaluations are not of one model and precision")
    taken: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for each in found for row in each["rows"] if row["strategy"] != "full"):
        taken.setdefault((row["set"], row["strategy"]), judged(row))
    rows = list(taken.values())
    agree = sum(row["f1_passes"] == row["regret_passes"] for row in rows)
    print(f"{agree} of {len(rows)} verdicts by the regret agree with those by F1")
    workload = {name: first["workload"][name] for name in SAME}
    ran_on = first["environment"]
    report.write("verdicts", workload, rows, out=given.out, note=NOTE, ran_on=ran_on, shown=SHOWN)
    if given.by_set:
        names = dict.fromkeys(row["set"] for row in rows)
        summary = [counted(name, [row for row in rows if row["set"] == name]) for name in names]
        summary.append(counted("all", rows))
        report.write("verdicts-by-set", workload, summary, out=given.by_set, note=NOTE_BY_SET, ran_on=ran_on)


FIGURES = (
    *("set", "strategy", "n", "f1", "f1_vs_full", "f1_vs_full_se", "kl", "answer_kl", "answer_agrees"),
    *("answer_regret", "kept", "recomputed"),
)
SHOWN = ("set", "strategy", "n", "f1_vs_full", "answer_kl", "answer_regret", "f1_passes", "regret_passes")


def counted(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of strategies by both verdicts."""
    both = [(row["f1_passes"], row["regret_passes"]) for row in rows]
    clear = [row for row in rows if row["f1_vs_full"] + ONE_SIDED * row["f1_vs_full_se"] < -MAX_F1_LOSS]
    return {
        "set": name,
        "strategies": len(rows),
        "both pass": both.count((True, True)),
        "both refuse": both.count((False, False)),
        "only F1 refuses": both.count((False, True)),
        "only without labels refused": both.count((True, False)),
        "F1 surely lower": len(clear),
        "of these passed without labels": sum(row["regret_passes"] for row in clear),
    }


def judged(row: dict[str, Any]) -> dict[str, Any]:
    close = row["answer_kl"] <= MAX_ANSWER_KL
    return {name: row[name] for name in FIGURES} | {
        "f1_passes": row["f1_vs_full"] >= -MAX_F1_LOSS,
        "regret_passes": close and row["answer_regret"] <= MAX_REGRET,
        "agreement_passes": close and row["answer_agrees"] >= 98,
        "first_token_passes": row["kl"] <= MAX_KL,
    }


if __name__ == "__main__":
    main()
