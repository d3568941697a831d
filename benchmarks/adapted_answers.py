"""Does a model that `ragserve adapt` has trained answer from reused documents as its base does over whole
prompts?

    python -m benchmarks.adapted_answers table FOLDER [--report REPORT.json]
    python -m benchmarks.adapted_answers pack WORK OUT

FOLDER has the answers of `benchmarks.document_prefixes` and `benchmarks.recompute_rules` by base and adapted
model, as `gpu_adapt.sh evaluate` writes them. The table has a row a set and one of all: F1 of the base's
whole prompts, composed ones with nothing recomputed of both, the share of the loss that is recovered, the
adapted model's whole prompts, composed ones with 2 % recomputed, and the best quarter of the passages
composed against the same quarter prefilled. The rivals are the base itself and exact prefill.

`pack` copies a run's work folder with its adapter in 16 bits and without the optimiser's state, for another
machine."""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Scores = dict[tuple[str, int], float]
"""Points of F1 by set and question."""


def scores(folder: Path, model: str, part: str) -> dict[tuple[str, float], Scores]:
    """F1 by variant and recomputed share, of the runs of one part."""
    found: dict[tuple[str, float], Scores] = collections.defaultdict(dict)
    for path in sorted(folder.glob(f"{model}-{part}-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            key = (row.get("variant", row.get("rule")), row.get("recomputed", row.get("share")))
            found[key][row["set"], row["question"]] = 100 * row["f1"]
    return found


def table(folder: Path) -> list[dict[str, Any]]:
    """A row a set, over the questions that every variant has answered, then the mean of the sets."""
    columns: dict[str, Scores] = {}
    for model in ("base", "adapted"):
        whole, best = (scores(folder, model, part) for part in ("all", "best"))
        columns[f"{model}_full"] = whole["full", 1.0]
        columns[f"{model}_composed"] = whole["fixed 512", 0.0]
        columns[f"{model}_recomputed"] = whole["fixed 512", 0.02]
        columns[f"{model}_quarter"], columns[f"{model}_quarter_exact"] = best["none", 0.0], best["exact", 1.0]
    common = set.intersection(*(set(each) for each in columns.values()))
    if not common:
        raise SystemExit(f"{folder} has no question that all runs have answered")
    rows = []
    for name in sorted({each for each, _ in common}):
        keys = [key for key in common if key[0] == name]
        rows.append(
            {"set": name, "n": len(keys)}
            | {column: statistics.fmean(found[key] for key in keys) for column, found in columns.items()}
        )
    mean = {column: statistics.fmean(row[column] for row in rows) for column in columns}
    rows.append({"set": "mean of the sets", "n": len(common)} | mean)
    return [_with_margins(row) for row in rows]


def _with_margins(row: dict[str, Any]) -> dict[str, Any]:
    lost = row["base_full"] - row["base_composed"]
    recovered = (row["adapted_composed"] - row["base_composed"]) / lost if lost >= 1 else None
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()} | {
        "recovered": None if recovered is None else round(recovered, 2),
        "composed_vs_full": round(row["adapted_composed"] - row["base_full"], 1),
        "recomputed_vs_full": round(row["adapted_recomputed"] - row["base_full"], 1),
        "quarter_vs_exact": round(row["adapted_quarter"] - row["base_quarter_exact"], 1),
    }


def pack(work: Path, out: Path) -> None:
    """Copy a work folder, its tensors in bfloat16; `ragserve adapt --work` goes on from the copy."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in work.rglob("*"):
        place = out / path.relative_to(work)
        if path.suffix == ".safetensors" and path.parent.name != "merged":
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: each.to(torch.bfloat16) for name, each in load_file(path).items()}, place)
        elif path.suffix in (".json", ".jsonl") and path.parent == work:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def show(args: argparse.Namespace) -> None:
    """Print the table, and write it as a report of the machine that answered."""
    rows = table(args.folder)
    for row in rows:
        print(json.dumps(row))
    if args.report:
        first = json.loads(next(iter(sorted(args.folder.glob("adapted-all-*.json")))).read_text())
        report = {
            "name": "Answers of an adapted model",
            "workload": {"model": first["model"], "engine": "emulation", "prefix": "fixed 512"},
            "environment": {**first["machine"], "versions": first["versions"], "date": args.date},
            "rows": rows,
        }
        args.report.write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    shown = commands.add_parser("table")
    shown.add_argument("folder", type=Path)
    shown.add_argument("--report", type=Path)
    shown.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    shown.set_defaults(do=show)
    packed = commands.add_parser("pack")
    packed.add_argument("work", type=Path)
    packed.add_argument("out", type=Path)
    packed.set_defaults(do=lambda args: pack(args.work, args.out))
    args = parser.parse_args(arguments)
    args.do(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
