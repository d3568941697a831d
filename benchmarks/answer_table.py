"""A table of the answers of one or several runs of `ragserve eval` or `benchmarks.gpu_eval`.

    python -m benchmarks.answer_table REPORT.json NAME=FOLDER ... [--full NAME]

FOLDER holds a run's rows-*.jsonl and eval.json; NAME (the documents' prefix, say) stands in the first column.
A row a strategy: F1, exact match, containment, refusals, what was kept and recomputed of the document tokens,
and paired differences of F1 in points: from `full`, of the run ``--full`` names (default: the first), and,
where only the best passages are read from stored KV, from the exact prefill of the same passages. Intervals
are half the width at 95 %; sets count alike."""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.paired import Scores, difference
from ragserve.files import write_json

_CHOICE = re.compile(r"concat:passages\.keep=([\d.]+)")


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The answered rows of a run by strategy."""
    found = collections.defaultdict(list)
    for path in sorted(folder.glob("rows-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["error"] is None:
                found[row["strategy"]].append(row)
    return found


def scores(rows: list[dict[str, Any]]) -> Scores:
    return {(row["set"], row["id"]): 100 * row["f1"] for row in rows}


def row_of(
    name: str, strategy: str, rows: list[dict[str, Any]], references: dict[str, Scores]
) -> dict[str, Any]:
    """``references``: the scores of `full` and of each `passages:keep=SHARE`."""

    def percent(field: str) -> float:
        return round(100 * statistics.fmean(row[field] for row in rows), 1)

    def of_tokens(field: str) -> float:
        return round(100 * sum(row[field] for row in rows) / sum(row["document_tokens"] for row in rows), 1)

    made = {"run": name, "strategy": strategy, "n": len(rows), "f1": percent("f1"), "em": percent("em")}
    made |= {"contains": percent("contains"), "refused": percent("refused")}
    made |= {"kept": of_tokens("kept"), "recomputed": of_tokens("recomputed")}
    made |= difference(scores(rows), references["full"])
    choice = _CHOICE.match(strategy)
    if choice and (exact := references.get(f"passages:keep={choice[1]}")):
        beside = difference(scores(rows), exact)
        worst = min(value for key, value in beside.items() if key not in ("difference", "interval"))
        made |= {"beside exact": beside["difference"], "its interval": beside["interval"], "worst set": worst}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--full", help="the run whose `full` and `passages` are the references")
    given = parser.parse_args()
    folders = {name: Path(folder) for name, _, folder in (run.partition("=") for run in given.runs)}
    reference = rows_of(folders[given.full or next(iter(folders))])
    references = {
        strategy: scores(rows)
        for strategy, rows in reference.items()
        if strategy == "full" or strategy.startswith("passages")
    }
    made = [
        row_of(name, strategy, rows, references)
        for name, folder in folders.items()
        for strategy, rows in rows_of(folder).items()
    ]
    head = json.loads((next(iter(folders.values())) / "eval.json").read_text(encoding="utf-8"))
    workload = {key: value for key, value in head["workload"].items() if key not in ("prefix", "limit")}
    note = " ".join(str(__doc__).split("\n\n")[-1].split()).partition("A row a strategy: ")[2]
    report = {"benchmark": "answers", "workload": workload, "environment": head["environment"], "note": note}
    write_json(given.report, report | {"rows": made})
    for row in made:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
