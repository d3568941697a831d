"""Evaluate a set over a running server's REST API: the whole product, and where it loses answers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragserve.client import Client
from ragserve.eval import multiturn
from ragserve.eval.console import progress
from ragserve.eval.data import Half, Question, distinct_passages, load, set_name
from ragserve.eval.dialogue_sets import AskedAt, Dialogue, load_dialogues
from ragserve.eval.run import Options, ask_given, ask_retrieved, ingested, losses, summary
from ragserve.strategy_spec import FULL
from ragserve.verification import report

Line = dict[str, Any]


def evaluate_set(
    client: Client,
    path: Path,
    runs: Sequence[Options],
    *,
    mode: str,
    turns: int,
    limit: int | None,
    out: Path | None,
    asked_at: AskedAt = "end",
    ahead: int = 1,
    half: Half | None = None,
) -> list[Line]:
    """Print one set's table, write it to ``out``, and return a line for each question and strategy.
    ``mode``: given, retrieved or multiturn; ``turns``, ``asked_at``, ``ahead``: of dialogues of the last
    one. ``half``: of the set."""
    if mode == "multiturn":
        dialogues = load_dialogues(path, turns, limit, asked_at, ahead, half)
        rows, lost, lines, workload = _multiturn(client, dialogues, runs)
        workload |= {"questions": turns * len(dialogues), "turns": turns, "asked_at": asked_at}
        workload["ahead"] = ahead
    else:
        questions = load(path, limit, half)
        workload = {"questions": len(questions)}
        rows, lost, lines, more = (_retrieved if mode == "retrieved" else _given)(client, questions, runs)
        workload |= more
    name = set_name(path)
    workload = {
        "set": name,
        "half": half,
        "mode": mode,
        "model": Path(client.info().model).name,
        **workload,
    }
    _write(rows, lost, workload, out)
    return [{"set": name, **line} for line in lines]


def report_of(path: Path, paths: Sequence[Path], out: Path | None) -> Path | None:
    """The report file of a set. With several sets, each gets its set's name."""
    return out.with_name(f"{out.stem}-{set_name(path)}{out.suffix}") if out and len(paths) > 1 else out


_Run = tuple[list[Line], list[Line], list[Line], dict[str, Any]]


def _given(client: Client, questions: Sequence[Question], runs: Sequence[Options]) -> _Run:
    rows, lines = [], []
    for options in runs:
        with progress(f"given, {options.label}", len(questions)) as step:
            outcomes = ask_given(client, questions, options, progress=step)
        rows.append({"context": "the row's documents", "strategy": options.label, **summary(outcomes)})
        lines += [{"context": "given", "strategy": options.label, **outcome.record()} for outcome in outcomes]
    return rows, [], lines, {"max_new_tokens": runs[0].max_new_tokens, "concurrency": runs[0].concurrency}


def _retrieved(client: Client, questions: Sequence[Question], runs: Sequence[Options]) -> _Run:
    rows, lost, lines = [], [], []
    with contextlib.ExitStack() as stack:
        with progress("ingesting", len(distinct_passages(questions))) as step:
            namespace, ingestion = stack.enter_context(ingested(client, questions, on_progress=step))
        for options in runs:
            with progress(f"retrieved, {options.label}", len(questions)) as step:
                retrieved = ask_retrieved(client, namespace, questions, options, progress=step)
            with progress(f"gold, {options.label}", len(questions)) as step:
                ceiling = ask_given(client, questions, options, gold=True, progress=step)
            for context, outcomes in (("retrieved", retrieved), ("gold documents alone", ceiling)):
                head = {"context": context, "strategy": options.label}
                rows.append(head | summary(outcomes))
                lines += [head | outcome.record() for outcome in outcomes]
            lost.append({"strategy": options.label, **losses(retrieved, ceiling)})
    settings = {"k": runs[0].k, "max_new_tokens": runs[0].max_new_tokens, "concurrency": runs[0].concurrency}
    return rows, lost, lines, settings | ingestion


def _multiturn(client: Client, dialogues: Sequence[Dialogue], runs: Sequence[Options]) -> _Run:
    n_turns = sum(map(len, dialogues))
    found: dict[str, list[multiturn.TurnOutcome]] = {}
    for options in (*runs, None):  # the last one is the rival without sessions
        label = multiturn.DOCUMENTS_FIRST if options is None else str(options.label)
        with progress(f"multiturn, {label}", n_turns) as step:
            found[label] = multiturn.ask_dialogues(
                client, dialogues, options or runs[0], documents_first=options is None, progress=step
            )
    full = found.get(FULL.label, [])
    rows = [line for label, own in found.items() for line in multiturn.by_turn(label, own, full)]
    lines = [
        {"context": "multiturn", "strategy": label, **outcome.record()}
        for label, own in found.items()
        for outcome in own
    ]
    settings = {"max_new_tokens": runs[0].max_new_tokens, "concurrency": runs[0].concurrency}
    return rows, [], lines, settings | {"dialogues": len(dialogues)}


def _write(rows: list[Line], lost: list[Line], workload: dict[str, Any], out: Path | None) -> None:
    note = (
        "em, f1: percent, SQuAD's normalisation. contains: an accepted answer as whole words; refused: says "
        "that there is no answer. Tokens: per question, mean."
    )
    if workload["mode"] == "multiturn":
        note = multiturn.NOTE
    report.write(f"eval {workload['set']} {workload['mode']}", workload, rows, out=out, note=note)
    if lost:
        note = (
            "Percent of all questions; right to failed sum to 100. found: a retrieved passage of a gold "
            "document holds the answer, of the questions whose search did not fail. lost_reading_context: "
            "right with the gold documents alone; lost_reading: wrong even then. failed: not answered, or "
            "wrong and not answered with the gold documents alone."
        )
        path = out.with_name(f"{out.stem}-losses{out.suffix}") if out else None
        report.write(f"eval {workload['set']} losses", workload, lost, out=path, note=note)
