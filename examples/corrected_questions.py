"""Questions with one typing error as `/rag/query` corrects them, and what that leaves of the error's cost.

    python examples/corrected_questions.py OUT.json SETS_DIR [--only qed10,squad10,2wikimqa] [--limit 100]
        [--asked FOLDER --typed FOLDER] [--strategy STRATEGY]

All passages of a set are a namespace. Each question is spelled wrong as spelled_sets.py does it, corrected
by the namespace's words, and read by the model with what its own passages have, as in `/rag/query`. Needs no
model: a question that becomes what it was before the error is answered as that.

FOLDERs hold the answers to the questions as asked and as typed, rows-*.jsonl of gpu_eval.py (`curve` and
`spelled` of gpu_selection.sh). With them OUT has by how many points more the error costs STRATEGY than it
costs `full`, typed and corrected; of questions that correction changed into others both are left out."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.bench.retrieval import document_of
from ragserve.bench.selection import SPELLINGS
from ragserve.eval.data import Question, find, load, set_name
from ragserve.retrieval.embedder import Embedder
from ragserve.retrieval.spelling import SpellingCorrector
from ragserve.verification import report
from ragserve_index import IndexStore

NOTE = (
    "restored: become what they were before the error; left: as typed; others: neither. typed, corrected: by "
    "how many points of F1 more the error costs the strategy than full, question by question, +- its "
    "standard error; n: of how many, the others left out."
)
Answers = Mapping[tuple[str, str, str], float]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--only", default="qed10,squad10,2wikimqa")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--asked", type=Path)
    parser.add_argument("--typed", type=Path)
    parser.add_argument("--strategy", default="samkv:keep=0.25")
    given = parser.parse_args()
    embedder, rows = Embedder(), list[dict[str, Any]]()
    pooled: tuple[list[float], list[float]] = ([], [])
    for path in [find(name, given.sets) for name in given.only.split(",")]:
        questions = load(path, given.limit)
        kinds = asyncio.run(corrected(questions, embedder))
        counts = {
            kind: sum(each == kind for each in kinds.values()) for kind in ("restored", "left", "others")
        }
        row: dict[str, Any] = {"set": set_name(path), "questions": len(questions)} | counts
        if given.asked and given.typed:
            found = costs(set_name(path), kinds, answers(given.asked), answers(given.typed), given.strategy)
            row |= {"n": len(found[0])} | shown(*found)
            for kept, more in zip(pooled, found, strict=True):
                kept.extend(more)
        rows.append(row)
    if pooled[0]:
        total = {key: sum(row[key] for row in rows) for key in ("questions", "restored", "left", "others")}
        rows.append({"set": "all"} | total | {"n": len(pooled[0])} | shown(*pooled))
    workload = {"embedder": embedder.name, "strategy": given.strategy}
    report.write("corrected-questions", workload, rows, out=given.out, note=NOTE)
    return 0


def texts_of(question: Question) -> list[str]:
    return [f"{passage.title} {passage.text}" for passage in question.documents]


async def corrected(questions: Sequence[Question], embedder: Embedder) -> dict[str, str]:
    """Return what becomes of each question, by its id."""
    passages = {text for question in questions for text in texts_of(question)}
    spell, kinds = SPELLINGS["one typo"], {}
    with tempfile.TemporaryDirectory() as folder, IndexStore(Path(folder)) as store:
        store.ensure_namespace("set", embedder=embedder.name, dim=embedder.dim)
        vector = embedder.encode(["nothing is searched for by vectors"])
        store.replace_documents(
            "set", [(*document_of(str(i), text), vector) for i, text in enumerate(sorted(passages))]
        )
        spelling = SpellingCorrector(store, embedder.words)
        try:
            await spelling.read("set")
            for each in questions:
                typed = spell(each.question)
                found = await spelling.correct("set", [typed])
                read = found.found_in(texts_of(each)).texts[0]
                restored = read == each.question
                kinds[each.id] = "restored" if restored else "left" if read == typed else "others"
        finally:
            await spelling.close()
    return kinds


def answers(folder: Path) -> Answers:
    """Return F1 by set, strategy and question, in percent."""
    found: Iterator[dict[str, Any]] = (
        json.loads(line) for path in folder.glob("rows-*.jsonl") for line in path.read_text().splitlines()
    )
    return {(row["set"], row["strategy"], str(row["id"])): 100 * row["f1"] for row in found}


def costs(
    name: str, kinds: Mapping[str, str], asked: Answers, typed: Answers, strategy: str
) -> tuple[list[float], list[float]]:
    """Return how many points more the error costs a strategy than `full`, typed and corrected."""
    as_typed, as_corrected = [], []
    for question, kind in kinds.items():
        keys = [(name, each, question) for each in (strategy, "full")]
        wrong = [(f"{name}_typo", *key[1:]) for key in keys]
        if (
            kind == "others"
            or not all(key in asked for key in keys)
            or not all(key in typed for key in wrong)
        ):
            continue
        one, full = (asked[key] - typed[other] for key, other in zip(keys, wrong, strict=True))
        as_typed.append(one - full)
        as_corrected.append(0.0 if kind == "restored" else one - full)
    return as_typed, as_corrected


def shown(as_typed: Sequence[float], as_corrected: Sequence[float]) -> dict[str, float]:
    """Return means and their standard errors."""
    found = {}
    for label, values in (("typed", as_typed), ("corrected", as_corrected)):
        found[label] = round(statistics.mean(values), 2)
        found[f"{label} se"] = round(statistics.stdev(values) / math.sqrt(len(values)), 2)
    return found


if __name__ == "__main__":
    sys.exit(main())
