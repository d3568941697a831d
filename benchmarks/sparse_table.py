"""Tables of `benchmarks.sparse_answers`, and a model's record for `--sparse-attention auto`.

    python -m benchmarks.sparse_table REPORT.json FOLDER ... [--record ragserve-sparse.json]

FOLDER holds the rows of one model. REPORT.json gets a row for each model, length of context, engine and
setting, with a column for each set; and under `sets` one for each set, too: scores in percent, the paired
difference from dense attention in points with half the width of its 95 % interval, whether the loss is within
a point, the shares that were read, and how long answers agree with the dense one. Dense attention is that of
the same engine, which had the same prompts; for KV of few bits, that of the plain engine.
`scripts/readme-tables` puts the rows into benchmarks/results/sparse_answers.md. `--record` writes what of it
a server can have by its settings, for the model's folder."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.lib.paired import difference
from benchmarks.lib.sparse_engines import PLAIN, sparse_engines
from ragserve.config import Settings
from ragserve.eval.sparse_answers import DENSE, SparseSetting, figures, recorded
from ragserve.files import write_json
from ragserve.profiles.sparse_attention import MIN_DENSE, SPARSE, SparseRecord, under
from ragserve.verification import rows as answers
from ragserve.verification.metrics import normalise, token_f1
from ragserve.verification.rows import Row

REFERENCE = f"{PLAIN}/{DENSE}"
_NUMBER = re.compile(r"\d[\d,]*")
_LENGTH = re.compile(r"[@_]\d+$")  # of a set's name
NOTE = (
    "Dense: F1 or, for lines and kv, answers that contain the value, percent. Others: points from dense "
    "attention in the same engine (KV of few bits: with 16 bits in pages of 64) on the same questions, with "
    "half the width of the paired 95 % interval; mean: of the sets, each counting alike. n: questions of the "
    "sets. read: share of the context's pages that decode steps read; blocks: share of dense prefill's "
    "blocks. holds: on every set at most a point lost, and at 95 % less than five, on 100 questions or more; "
    "open: fewer questions, or no set where dense scores 20 percent and less was read. Figures of single "
    "sets, and how far answers agree with dense ones: `sets` of the JSON."
)


def merged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model, length of context, engine and setting, with a column for each set."""
    found: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["model"], _length(row["prompt"]), row["engine"], row["setting"])
        found.setdefault(key, []).append(row)
    return [_merged(*key, found[key]) for key in sorted(found, key=_place)]


def _place(key: tuple[str, str, str, str]) -> tuple[Any, ...]:
    """The reference first, then the plain engine's settings, then others; budgets by their size."""
    model, context, engine, setting = key
    size, *_ = [int(digits.replace(",", "")) for digits in _NUMBER.findall(setting)] or [0]
    kind = setting.partition(" ")[0], setting.partition(",")[2]
    return model, context, engine != PLAIN, engine, setting != DENSE, kind, size, setting


def _length(tokens: int) -> str:
    return f"{2 ** round(math.log2(max(tokens, 500) / 1000))}k"


def _merged(model: str, context: str, engine: str, setting: str, own: Sequence[Row]) -> dict[str, Any]:
    line: dict[str, Any] = {"model": model, "context": context, "engine": engine, "setting": setting}
    others = [row for row in own if row["difference"] is not None]
    for row in own:
        line[_LENGTH.sub("", row["set"])] = (
            f"{row['difference']:+.1f} ± {row['interval']:.1f}" if row in others else f"{row['score']:.1f}"
        )
    if others:
        mean = statistics.fmean(row["difference"] for row in others)
        error = sum(row["interval"] ** 2 for row in others) ** 0.5 / len(others)
        line["mean"] = f"{mean:+.1f} ± {error:.1f}"
    else:
        line["mean"] = f"{statistics.fmean(row['score'] for row in own):.1f}"
    verdicts = {row["holds"] for row in own}
    line["holds"] = next(
        (each for each in ("no", "open", "yes") if each in verdicts), "open" if others else ""
    )
    line["n"] = _span([row["n"] for row in own])
    for name in ("read", "blocks"):
        line[name] = _mean([row[name] for row in own])
    line["failed"] = sum(row["failed"] for row in own)
    return line


def _span(counts: Sequence[int]) -> str:
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def reference_of(name: str) -> str:
    """The dense setting that a setting is compared with."""
    engine = name.partition("/")[0]
    return REFERENCE if engine.startswith("KV of ") else f"{engine}/{DENSE}"


def row_of(model: str, name: str, set_name: str, own: Sequence[Row], dense: Sequence[Row]) -> dict[str, Any]:
    """The figures of a setting on a set; ``dense``: the reference's rows of the set."""
    engine, _, setting = name.partition("/")
    is_reference = name == reference_of(name)
    found = figures(own, dense)[set_name]
    reference = {row["id"]: row for row in dense if not row["error"]}
    pairs = [(row, reference[row["id"]]) for row in own if not row["error"] and row["id"] in reference]
    beside = difference(
        *({(set_name, row["id"]): 100 * row["score"] for row in side} for side in zip(*pairs, strict=True))
    )
    reason = found.shortfall()
    counts = found.counts or (setting == DENSE and found.dense >= MIN_DENSE)  # KV of few bits reads all
    return {
        "model": model,
        "engine": engine,
        "setting": setting,
        "set": set_name,
        "n": found.n,
        "prompt": found.prompt_tokens,
        "score": round(found.score, 1),
        "difference": None if is_reference else beside["difference"],
        "interval": None if is_reference else beside["interval"],
        "holds": "" if is_reference else _verdict(counts, reason),
        "read": _mean([row["read"] for row, _ in pairs]),
        "blocks": _mean([row["blocks"] for row, _ in pairs]),
        "same": _percent([row["answer"] == other["answer"] for row, other in pairs]),
        "begins as dense": _percent([_begins(row["answer"], other["answer"]) for row, other in pairs]),
        "as dense": _percent([token_f1(row["answer"], [other["answer"]]) for row, other in pairs]),
        "failed": sum(bool(row["error"]) for row in own),
    }


def _verdict(counts: bool, reason: str | None) -> str:
    if not counts:
        return "-"
    return "yes" if reason is None else "open" if "fewer than" in reason else "no"


def _begins(said: str, wanted: str) -> float:
    """The share of the words of ``wanted`` up to the first one that ``said`` does not have there."""
    own, words = normalise(said).split(), normalise(wanted).split()
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, words, strict=False)))
    return same / len(words) if words else float(not own)


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 3)


def _percent(values: Sequence[float]) -> float:
    return round(100 * statistics.fmean(values), 1)


def rows_of(folder: Path) -> dict[tuple[str, str], list[Row]]:
    """The rows of a folder by setting and set."""
    found: dict[tuple[str, str], list[Row]] = {}
    for (set_name, _, name), row in answers.read(folder).items():
        found.setdefault((name, set_name), []).append(row)
    return found


def table(folder: Path) -> list[dict[str, Any]]:
    """The report's rows of a model: dense first, then engine by engine."""
    model = json.loads((folder / "run.json").read_text(encoding="utf-8"))["model"]
    found = rows_of(folder)
    made = []
    for (name, set_name), own in sorted(found.items(), key=lambda each: (each[0][0] != REFERENCE, each[0])):
        dense = found.get((reference_of(name), set_name), [])
        if any(each.n for each in figures(own, dense).values()):
            made.append(row_of(model, name, set_name, own, dense))
    return made


def record(folder: Path, about: dict[str, Any]) -> SparseRecord:
    """What the plain engine's settings cost, in the form that a server reads."""
    rows = [row for row in answers.read(folder).values() if row["strategy"].startswith(f"{PLAIN}/")]
    labels = {row["strategy"].partition("/")[2] for row in rows}
    budgets = sorted(int(label.split()[1].replace(",", "")) for label in labels if _is_budget(label))
    every = sparse_engines(budgets or [1], [])[PLAIN].asked
    asked = [each for each in every if each.label in labels]

    def named(setting: SparseSetting) -> str:
        return f"{PLAIN}/{setting.label}"

    ran = about["environment"]
    return SparseRecord(
        under(Settings()),
        recorded(asked, rows, named, among=max(1, sum(bool(each.server) for each in asked))),
        about["engine"]["dtype"],
        Path(about["engine"]["model"]).name,
        ran["gpu"] or ran["cpu"],
        ran["date"],
    )


def _is_budget(label: str) -> bool:
    return label.startswith("budget ") and label[7:].replace(",", "").isdigit()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    made = [row for folder in given.folders for row in table(folder)]
    about = {
        folder: json.loads(next(folder.glob("engine-*.json")).read_text(encoding="utf-8"))
        for folder in given.folders
    }
    first = about[given.folders[0]]
    engine = {name: first["engine"][name] for name in ("dtype", "attention_backend")}
    workload = {"decoding": "greedy", **engine}
    report = {"benchmark": "sparse answers", "workload": workload, "environment": first["environment"]}
    rows = merged(made)
    write_json(given.report, report | {"rows": rows, "sets": made, "note": NOTE})
    for row in rows:
        print(json.dumps(row))
    if given.record:
        for folder, each in about.items():
            SPARSE.save(given.record, each["engine"]["fingerprint"], record(folder, each))
    return 0


if __name__ == "__main__":
    sys.exit(main())
