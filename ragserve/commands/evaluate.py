"""`ragserve eval`: exact match and F1 over a question set, per strategy, and where answers are lost."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ragserve.config import StrategyName
from ragserve.errors import InvalidRequest


class Mode(enum.StrEnum):
    given = "given"
    retrieved = "retrieved"


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    data: Annotated[Path, typer.Option(help="Question set: JSON lines, .jsonl or .jsonl.gz.")],
    mode: Annotated[
        Mode, typer.Option(help="given: each row's documents, in order; retrieved: all documents ingested, k retrieved.")
    ] = Mode.given,
    strategies: Annotated[str, typer.Option(help="Separated by commas.")] = "full,prefix",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions, spread evenly over the set.")] = None,
    k: Annotated[int, typer.Option(min=1, max=64, help="Passages retrieved for a question.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer in tokens.")] = 24,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Questions in flight.")] = 4,
    url: Annotated[str | None, typer.Option(help="A running server; without it one is started for the evaluation.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="RAGSERVE_API_KEY", help="Its key.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of the server that is started.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write one JSON line a question there.")] = None,
) -> None:
    """Score answers over a question set as SQuAD does, decoding greedily. Exits with 1 if a request failed."""
    from ragserve.bench.server import running_server
    from ragserve.client import Client
    from ragserve.eval.data import load
    from ragserve.eval.run import Options

    chosen = [name.strip() for name in strategies.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in get_args(StrategyName)]:
        raise InvalidRequest(f"Unknown strategy {unknown[0]!r}.", hint=f"Choose from {', '.join(get_args(StrategyName))}.")
    if url and model:
        raise InvalidRequest("--model starts a server and --url names a running one.", hint="Give one of them.")
    questions = load(data, limit)
    with contextlib.ExitStack() as stack:
        if url is None:
            flags: dict[str, Any] = {"model": model, "api_key": api_key}
            url = stack.enter_context(running_server(**{name: value for name, value in flags.items() if value is not None})).url
        client = stack.enter_context(Client(url, api_key=api_key))
        info = client.info()
        runs = [Options(strategy, k, max_new_tokens, concurrency) for strategy in chosen]
        run = _given if mode is Mode.given else _retrieved
        rows, losses, lines, workload = run(client, questions, runs)
    workload = {
        "set": data.name.split(".")[0],
        "mode": mode.value,
        "questions": len(questions),
        "model": Path(info["model"]).name,
        **workload,
    }
    _write(rows, losses, workload, out)
    if records is not None:
        records.parent.mkdir(parents=True, exist_ok=True)
        records.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    if any(row["failed"] for row in rows):
        first = next(line["error"] for line in lines if line["error"])
        typer.secho(f"Some requests failed and count as wrong; the first: {first}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1)


_Run = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]


def _given(client: Any, questions: Sequence[Any], runs: Sequence[Any]) -> _Run:
    from ragserve.eval.run import ask_given, summary

    rows, lines = [], []
    for options in runs:
        with _progress(f"given, {options.strategy}", len(questions)) as step:
            outcomes = ask_given(client, questions, options, progress=step)
        rows.append({"context": "the row's documents", "strategy": options.strategy, **summary(outcomes)})
        lines += [{"context": "given", "strategy": options.strategy, **outcome.record()} for outcome in outcomes]
    return rows, [], lines, {"max_new_tokens": runs[0].max_new_tokens, "concurrency": runs[0].concurrency}


def _retrieved(client: Any, questions: Sequence[Any], runs: Sequence[Any]) -> _Run:
    from ragserve.eval.data import distinct_passages
    from ragserve.eval.run import ask_given, ask_retrieved, ingested, losses, summary

    rows, lost, lines = [], [], []
    with contextlib.ExitStack() as stack:
        with _progress("ingesting", len(distinct_passages(questions))) as step:
            namespace, ingestion = stack.enter_context(ingested(client, questions, on_progress=step))
        for options in runs:
            with _progress(f"retrieved, {options.strategy}", len(questions)) as step:
                retrieved = ask_retrieved(client, namespace, questions, options, progress=step)
            with _progress(f"gold, {options.strategy}", len(questions)) as step:
                ceiling = ask_given(client, questions, options, gold=True, progress=step)
            for context, outcomes in (("retrieved", retrieved), ("gold documents alone", ceiling)):
                rows.append({"context": context, "strategy": options.strategy, **summary(outcomes)})
                lines += [{"context": context, "strategy": options.strategy, **outcome.record()} for outcome in outcomes]
            lost.append({"strategy": options.strategy, **losses(retrieved, ceiling)})
    first = runs[0]
    return rows, lost, lines, {"k": first.k, "max_new_tokens": first.max_new_tokens, "concurrency": first.concurrency, **ingestion}


def _write(rows: list[dict[str, Any]], losses: list[dict[str, Any]], workload: dict[str, Any], out: Path | None) -> None:
    from ragserve.bench import report

    note = "em, f1: percent, SQuAD's normalisation. Tokens: per question, mean."
    report.write(f"eval {workload['set']} {workload['mode']}", workload, rows, out=out, note=note)
    if losses:
        note = (
            "Percent of all questions; right to lost_reading sum to 100. found: a retrieved passage of a gold document holds the answer. "
            "lost_reading_context: right with the gold documents alone; lost_reading: wrong even then."
        )
        path = out.with_name(f"{out.stem}-losses{out.suffix}") if out else None
        report.write(f"eval {workload['set']} losses", workload, losses, out=path, note=note)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """A bar on stderr; yields the function that moves it by one, or to the given place."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)

        def step(done: int | None = None, _total: int | None = None) -> None:
            progress.update(task, completed=done) if done is not None else progress.advance(task)

        yield step
