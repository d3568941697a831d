"""Evaluate RAG over one's own documents: ask, average, and report as a table, as JSON and as a page."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ragserve.client import Client, Info
from ragserve.eval.console import progress
from ragserve.eval.data import Half, by_name, set_name
from ragserve.eval.judging import METRICS
from ragserve.eval.own_questions import OwnQuestion, load_own
from ragserve.eval.run import Options
from ragserve.eval.scoreboard import TIMES, lines
from ragserve.eval.served import ServedPlan, ask_served, ingested_folder, namespaces_of
from ragserve.files import write_json, write_text
from ragserve.setting_groups.per_namespace import NamespaceSettings
from ragserve.verification.report import assemble
from ragserve.verification.rows import Row

NOTE = (
    "In brackets: 95 % confidence intervals. Recall, nDCG and MRR: of the gold passages or, where none are "
    "given, documents, among the passages that the search was asked for. F1, exact match: SQuAD's "
    "normalisation. Citation precision: share of the cited passages that hold a gold passage, or are of a "
    "gold document and hold an accepted answer, over the answers that cite any; recall: share of what was to "
    "be found that such citations cover. Milliseconds are the client's. Failed requests count as 0."
)
# what answers depend on, beside the model and the defaults of queries
_OF_ENGINE = ("fingerprint", "dtype", "context_length", "page_bits", "samkv", "prefix", "sparse")
_OF_INDEX = ("default_type", "chunk_tokens")
_LOG_COLUMNS = 200  # width of a table printed to a file


@dataclass(frozen=True, slots=True)
class OwnRun:
    """Where to ask, in ``namespace`` or in a fresh one with the files of ``documents``, where to keep the
    answers, and where to write the reports."""

    namespace: str | None = None
    documents: Path | None = None
    work: Path | None = None
    out: Path | None = None
    html: Path | None = None


def load_sets(
    paths: Sequence[Path], limit: int | None, half: Half | None = None
) -> dict[Path, list[OwnQuestion]]:
    """Load the questions of each file, or of ``half`` of each. Raises InvalidRequest for bad lines and two
    sets of one name."""
    return {path: load_own(path, limit, half) for path in by_name(paths).values()}


def evaluate_own(
    client: Client, sets: Mapping[Path, Sequence[OwnQuestion]], options: Sequence[Options], run: OwnRun
) -> list[Row]:
    """Ask the questions, print the table, write the reports that are wanted, and return a row for each
    question and strategy."""
    info = client.info()
    with contextlib.ExitStack() as stack:
        folder = run.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragserve-eval-")))
        namespace, facts = run.namespace or "default", dict[str, Any]()
        if run.documents is not None:
            with progress("ingesting", None) as step:
                how = {"fresh": run.work is None, "warm": any(each.is_composed for each in options)}
                taken = ingested_folder(client, run.documents, progress=step, **how)
                namespace, facts = stack.enter_context(taken)
        own = {name: client.namespace_settings(name) for name in namespaces_of(sets, namespace)}
        k = {name: each.k or info.defaults["k"] for name, each in own.items()}
        plan = ServedPlan({set_name(path): sets[path] for path in sets}, options, namespace, k)
        identity = _identity(client, info, plan, list(sets), facts, own)
        with progress("answers", sum(map(len, sets.values())) * len(options)) as step:
            rows = ask_served(client, plan, folder, identity, step)
    report = assemble("eval of own documents", _workload(info, plan, run.documents, facts), lines(rows), NOTE)
    _print(report)
    if run.out is not None:
        write_json(run.out, report)
    if run.html is not None:
        from ragserve.eval.html_report import page

        write_text(run.html, page(report, rows))
    for path in filter(None, (run.out, run.html)):
        print(f"written: {path}")
    return rows


def _identity(
    client: Client,
    info: Info,
    plan: ServedPlan,
    paths: Sequence[Path],
    facts: Mapping[str, Any],
    own: Mapping[str, NamespaceSettings],
) -> dict[str, Any]:
    """The facts that all rows of one table must share. ``own``: the settings of the namespaces."""
    made = facts.get("digest")  # of a namespace of the run's own, whose name is no fact
    return {
        "model": info.model,
        "engine": {name: info.engine.get(name) for name in _OF_ENGINE},
        "embedder": info.embedder,
        "defaults": info.defaults,
        "system text": [info.system_prompt, plan.options[0].system],
        "namespaces": {} if made else {name: each.given() for name, each in own.items()},
        "documents": made or {name: client.namespace(name).version for name in own},
        "index": {name: info.index.get(name) for name in _OF_INDEX} if made else {},
        "k": plan.options[0].k,
        "max_new_tokens": plan.options[0].max_new_tokens,
        "sets": {set_name(path): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths},
    }


def _workload(
    info: Info, plan: ServedPlan, documents: Path | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    every: list[OwnQuestion] = [question for questions in plan.sets.values() for question in questions]
    labels = ("answers", "documents", "passages")
    given = {f"with {name}": sum(bool(getattr(question, name)) for question in every) for name in labels}
    return {
        "sets": ", ".join(plan.sets),
        "questions": len(every),
        **given,
        **({"namespace": ", ".join(plan.k)} if documents is None else {"folder": documents.name}),
        **{name: facts[name] for name in ("documents", "unreadable") if facts.get(name)},
        "model": Path(info.model).name,
        "embedder": info.embedder["name"],
        "retrieval": info.defaults["retrieval"],
        "k": plan.options[0].k or info.defaults["k"],
        "max_new_tokens": plan.options[0].max_new_tokens or info.defaults["max_new_tokens"],
        "in flight": plan.options[0].concurrency,
    }


def _print(report: Mapping[str, Any]) -> None:
    """Print the averages: a column for each strategy."""
    console = Console(width=None if sys.stdout.isatty() else _LOG_COLUMNS, highlight=False)
    console.print(", ".join(f"{name}: {value}" for name, value in report["workload"].items()), markup=False)
    table = Table()
    table.add_column("percent")
    for line in report["rows"]:
        table.add_column(line["strategy"], justify="right")
    for name, title in METRICS.items():
        if any(line[name] is not None for line in report["rows"]):
            table.add_row(title, *(_interval(line, name) for line in report["rows"]))
    if len(report["rows"]) > 1:
        beside = [_interval(line, "f1_vs_first", sign="+") for line in report["rows"]]
        table.add_row(f"F1 beside {report['rows'][0]['strategy']}", *beside)
    for name, title in TIMES.items():
        cells = [
            line[name] and f"{line[name]['p50']:,.0f} p95 {line[name]['p95']:,.0f}" for line in report["rows"]
        ]
        table.add_row(title, *(cell or "" for cell in cells))
    table.add_row("Failed requests", *(str(line["failed"]) for line in report["rows"]))
    console.print(table)
    console.print(NOTE, markup=False)


def _interval(line: Mapping[str, Any], name: str, sign: str = "") -> str:
    if line.get(name) is None:
        return ""
    low, high = line[f"{name}_95"]
    return f"{line[name]:{sign}.1f} \\[{low:{sign}.1f}, {high:{sign}.1f}]"
