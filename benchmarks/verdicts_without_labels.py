"""Verdicts without labels beside those of labels, on labelled sets, and the k that each would choose.

    python -m benchmarks.verdicts_without_labels OUT_DIR SETS_DIR --model FOLDER [--only SET,...]
        [--probes 500] [--labelled 400] [--k 20] [--engines 4] [--seconds 480] [--strategies LIST]

The passages of a set are one pool, from which the embedder brings k. On it questions are made as
`ragserve tune` makes them, and the set's own questions are asked with their answers as references; every
strategy is asked all of both, by the product's own comparison. A verdict is that of the gate, at ``--margin``
points. Needs SGLang, an embedder (RAGSERVE_EMBEDDER: name or folder) and this checkout. Rows are kept in
OUT_DIR: the same command goes on, and ``--seconds 0`` only reports. RAGSERVE_ATTENTION names the attention
backend."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.fan_out import engine_args
from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings, load
from ragserve.engine.local import LocalEngine
from ragserve.eval.data import Question, distinct_passages, find, set_name, spread
from ragserve.eval.data import load as load_set
from ragserve.ingest.chunk_embedding import embedding_text
from ragserve.profiles.figures import MARGIN
from ragserve.retrieval.embedder import Embedder
from ragserve.retrieval.passage_search import FoundPassage, FoundPassages
from ragserve.retrieval.search_options import SearchOptions
from ragserve.strategy_spec import candidates, parse
from ragserve.verification import report, rows
from ragserve.verification.comparison import Comparison
from ragserve.verification.course import Course
from ragserve.verification.questions import DrawnQuestion
from ragserve.verification.tuned_queries import TunedQueries
from ragserve.verification.verdicts import figures_of, full_figures
from ragserve_index.types import Chunk

SETS = "squad10,qed10,musique,2wikimqa"
IN_FLIGHT = 12
POOL_TOKENS = 300_000  # of each engine
NOTE = (
    "probes: questions made from the pool's passages; labelled: the set's own. vs_full: points of the score "
    "(F1 and containment) beside full; margin: smallest loss excluded at 95 %; passes: a margin of at most "
    "the limit. wrong: passes without labels, and loses more than the limit by the mean of the labels."
)
Floats = npt.NDArray[np.float32]


@dataclass
class Pool:
    """All passages of a set, searched by the embedder. A `Search` of one question at a time."""

    chunks: list[Chunk]
    vectors: Floats
    embedder: Embedder

    @classmethod
    def of(cls, questions: Sequence[Question], embedder: Embedder, place: Path) -> Pool:
        found = distinct_passages(questions)
        chunks = [
            Chunk(n, f"d{n}", 0, each.text, 0, len(each.text), None, 0, f"{n}", each.title, {})
            for n, each in enumerate(found, 1)
        ]
        if not place.exists():
            made = embedder.encode([embedding_text(each.title, each.text) for each in found])
            own = place.with_name(f"{place.stem}-{os.getpid()}.npy")
            np.save(own, made)
            own.rename(place)
        return cls(chunks, np.load(place), embedder)

    async def search(
        self, namespace: str, question: str, options: SearchOptions, *, sentences: bool = False
    ) -> FoundPassages:
        """Find the k nearest passages."""
        [vector] = await asyncio.to_thread(self.embedder.encode_queries, [question])
        cosines = self.vectors @ vector
        best = (-cosines).argsort(kind="stable")[: options.k]
        found = [FoundPassage(self.chunks[n], float(cosines[n]), float(cosines[n])) for n in best]
        return FoundPassages(found, [[] for _ in found], 0, None, None, 0.0, None)


def _settings(given: argparse.Namespace) -> Settings:
    graphs = {"cuda_graph_max_bs_decode": 16, "disable_prefill_cuda_graph": True}
    own: dict[str, Any] = {"model": given.model} if given.model else {}
    if given.cpu:
        return load(top_k=given.k, **own)
    return load(
        top_k=given.k,
        max_total_tokens=POOL_TOKENS,
        engine_args=graphs | engine_args(None),
        kv_disk_bytes=0,
        **own,
    )


def _specs(given: argparse.Namespace) -> list[Any]:
    return parse(given.strategies or candidates(given.k))


async def _ask(given: argparse.Namespace, settings: Settings, engine: LocalEngine, until: float) -> None:
    """Ask this worker's part of all sets: a labelled question and a passage in turn."""
    builder = PromptBuilder.load(engine.info.tokenizer, settings.system_prompt)
    embedder = Embedder.of(settings)
    known = rows.read(given.out)
    specs = _specs(given)
    with rows.appending(given.out / f"rows-{given.worker}.jsonl") as write:
        waiting: list[tuple[Comparison, DrawnQuestion | Chunk]] = []
        for path in (find(name, given.sets) for name in given.only.split(",")):
            name, questions = set_name(path), load_set(path)
            pool = Pool.of(questions, embedder, given.out / f"{name}-{len(questions)}.npy")
            comparisons = []
            for kind in ("probes", "labelled"):
                queries = TunedQueries.of(settings, f"{name}-{kind}", 32)
                compare = Comparison(engine, pool, builder, queries, specs, known=known, write=write)
                compare.steer(Course("verify", [spec.label for spec in specs]))
                comparisons.append(compare)
            drawn = spread(pool.chunks, given.probes)[given.worker :: given.engines]
            asked = [
                DrawnQuestion(each.id, "given", each.question, each.answers)
                for each in spread(questions, given.labelled)[given.worker :: given.engines]
            ]
            waiting += [(comparisons[0], each) for each in drawn] + [(comparisons[1], each) for each in asked]
        random.Random(0).shuffle(waiting)  # any beginning holds about the same share of everything
        order = iter(waiting)

        async def worker() -> None:
            for compare, each in order:
                if time.time() >= until:
                    return
                if isinstance(each, Chunk):
                    await compare.about(each)
                else:
                    await compare.ask(each)

        async with asyncio.TaskGroup() as group:
            for _ in range(given.in_flight):
                group.create_task(worker())


def _work(given: argparse.Namespace) -> None:
    from ragserve.engine.offline import run_once

    settings = _settings(given).model_copy(update={"data_dir": given.out / f"data-{given.worker}"})
    until = given.began + given.seconds
    run_once(settings, lambda engine: _ask(given, settings, engine, until))


def compared(
    name: str, every: Sequence[rows.Row], labels: Sequence[str], limit: float
) -> list[dict[str, Any]]:
    """A row for each strategy of a set."""
    found = []
    for label in labels:
        row: dict[str, Any] = {"set": name, "strategy": label}
        for kind in ("probes", "labelled"):
            own = [r for r in every if r["set"] == f"namespace {name}-{kind}" and r["strategy"] == label]
            figures = figures_of(own)
            row |= {
                f"{kind}": figures.references,
                f"{kind}: vs_full": figures.score_vs_full,
                f"{kind}: margin": figures.margin,
                f"{kind}: passes": figures.margin is not None and figures.margin <= limit,
                f"{kind}: differ %": figures.different,
                f"{kind}: failed": figures.failed,
            }
            if kind == "labelled":
                row |= {"kept %": figures.kept, "recomputed %": figures.recomputed, "KL": figures.answer_kl}
        loss = -(row["labelled: vs_full"] or 0.0)
        row["wrong"] = bool(row["probes: passes"] and loss > limit)
        row["agree"] = row["probes: passes"] == row["labelled: passes"]
        found.append(row)
    return found


def chosen_k(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The number of passages that probes would choose, and what it loses by labels against the best one."""
    of = {0: {"probes: vs_full": 0.0, "labelled: vs_full": 0.0}} | {
        int(row["strategy"].rpartition("=")[2]): row for row in found if "count=" in row["strategy"]
    }

    def gain(count: int, kind: str) -> float:
        found = of[count][f"{kind}: vs_full"]
        return -math.inf if found is None else found

    by = {kind: max(of, key=lambda count: gain(count, kind)) for kind in ("probes", "labelled")}
    best, mine = (of[by[kind]]["labelled: vs_full"] or 0.0 for kind in ("labelled", "probes"))
    return {
        "set": name,
        "k by probes": by["probes"] or "all",
        "k by labels": by["labelled"] or "all",
        "loses": round(best - mine, 2),
    }


def show(given: argparse.Namespace) -> None:
    """Report the rows that there are."""
    every = list(rows.read(given.out).values())
    labels = [spec.label for spec in _specs(given)]
    names = [set_name(find(name, given.sets)) for name in given.only.split(",")]
    tables = {name: compared(name, every, labels, given.margin) for name in names}
    workload: dict[str, Any] = {
        "model": Path(given.model or "ragserve-tiny").name,
        "k": given.k,
        "margin": given.margin,
    }
    for name in names:
        for kind in ("probes", "labelled"):
            own = [row for row in every if row["set"] == f"namespace {name}-{kind}"]
            tried = [row for row in own if "usable" in row]
            workload[f"{name} {kind}"] = full_figures(own) | {
                "tried": len(tried),
                "usable": sum(bool(row["usable"]) for row in tried),
                "kinds": {
                    k: sum(r.get("kind") == k and bool(r["usable"]) for r in tried)
                    for k in ("written", "pair", "cloze", "given")
                },
            }
        workload[f"{name} k"] = chosen_k(name, tables[name])
    table = [row for own in tables.values() for row in own]
    passing = [row for row in table if row["probes: passes"]]
    wrong = sum(row["wrong"] for row in passing)
    agree = sum(row["agree"] for row in table)
    workload["summary"] = (
        f"{agree} of {len(table)} verdicts agree; {wrong} of {len(passing)} that pass without labels lose "
        f"over {given.margin:g} points by labels"
    )
    print(json.dumps(workload, indent=1))
    report.write("verdicts-without-labels", {"summary": workload["summary"]}, table, out=None, note=NOTE)
    report.write_json(
        given.out / "verdicts-without-labels.json",
        report.assemble("verdicts-without-labels", workload, table, NOTE),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--only", default=SETS)
    parser.add_argument("--probes", type=int, default=500, help="passages of a set to ask about")
    parser.add_argument("--labelled", type=int, default=400, help="questions of a set")
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--margin", type=float, default=MARGIN)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--strategies", help="default: those of ragserve tune")
    parser.add_argument("--cpu", action="store_true", help="SGLang's defaults, for a trial without a GPU")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.worker is not None:
        _work(given)
        return 0
    if given.seconds:
        running = []
        for number in range(given.engines):
            command = [sys.executable, "-m", "benchmarks.verdicts_without_labels", *sys.argv[1:]]
            command += ["--worker", str(number), "--began", str(given.began)]
            log = (given.out / f"worker-{number}.log").open("ab")
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        print("workers ended with", [each.wait() for each in running], flush=True)
    show(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
