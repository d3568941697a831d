"""Console output of jobs: a progress bar while it runs, and a table or JSON at its end."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ragserve.ingest.jobs.job_report import JobReport
from ragserve.ingest.jobs.job_report import Progress as Counts
from ragserve.progress_lines import progress_lines

if TYPE_CHECKING:
    from ragserve.answering.results import Passage
    from ragserve_index.types import Chunk

_SHOWN_FAILURES = 20
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # of letters and of emoji


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def shown(name: str) -> str:
    """A name as it is, on one line: with escapes for what a terminal obeys or does not show."""
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in _JOINERS and unicodedata.category(character) in _HIDDEN
        else character
        for character in name
    )


def place(passage: Passage | Chunk) -> str:
    """Where in its document a passage is: ``page 3``, ``page 3-4``, ``sheet 2 (Revenue)``; empty without
    pages."""
    if not passage.page:
        return ""
    name = f" ({passage.page_name})" if passage.page_name else ""
    first = f"{passage.first_page}-" if passage.first_page not in (None, passage.page) else ""
    return f"{passage.page_kind} {first}{passage.page}{name}"


@contextmanager
def progress_bar(
    console: Console, *, enabled: bool, phase: str = "files"
) -> Iterator[Callable[[Counts], None]]:
    """Yield the function to call with each progress. Where ``console`` is no terminal, lines on stderr say
    how far this ``phase`` is."""
    if not enabled:
        yield lambda _: None
        return
    if not console.is_terminal:
        with progress_lines() as now:
            now(phase, "starting")
            yield lambda counts: now(phase, _counts(counts))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("files"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[rates]}", style="cyan"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    started = 0.0
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, rates="", name="")

        def show(counts: Counts) -> None:
            nonlocal started
            started = started or time.monotonic()  # at the first file: loading models is not ingestion speed
            seconds = max(time.monotonic() - started, 1e-3)
            chunks, tokens = counts.chunks / seconds, counts.tokens / seconds
            rates = f"{chunks:,.0f} chunks/s  {tokens:,.0f} tokens/s" if chunks else ""
            name = escape(shown(counts.current.rsplit("/", 1)[-1][:40]))
            bar.update(task, total=counts.total, completed=counts.done, rates=rates, name=name)

        yield show


def _counts(counts: Counts) -> str:
    name = shown(counts.current.rsplit("/", 1)[-1][:40])
    done = f"{counts.done:,} of {counts.total:,} files, {counts.chunks:,} chunks, {counts.tokens:,} tokens"
    return f"{done}  {name}" if name else done


def print_report(console: Console, report: JobReport, *, pruned: bool) -> None:
    """Print a summary, the failures with their reasons, and the documents whose file is gone."""
    progress = report.progress
    empty = report.state == "done" and not progress.total and not report.vanished
    state = "nothing to do" if empty else report.state
    console.print(f"[bold]namespace {report.namespace}: {state}[/bold] ({report.job_id})")
    if empty:
        return
    table = Table(show_header=False)
    summary = report.as_json()
    table.add_column(style="bold")
    table.add_column(justify="right")
    done = "warmed" if progress.warmed else "indexed"
    table.add_row("files", f"{progress.total:,}")
    for name in ("indexed", "warmed", "unchanged", "failed", "skipped", "removed"):
        if name in {done, "unchanged", "failed"} or summary["files"][name]:
            table.add_row(f"  {name}", f"{summary['files'][name]:,}")
    table.add_row(f"chunks {done}", f"{progress.chunks:,}")
    table.add_row(f"tokens {done}", f"{progress.tokens:,}")
    table.add_row("seconds", f"{report.seconds:,.1f}")
    table.add_row("chunks/s", f"{summary['chunks_per_s']:,.1f}")
    table.add_row("tokens/s", f"{summary['tokens_per_s']:,.0f}")
    console.print(table)
    _print_some(console, "failed", [f"{source}: {reason}" for source, reason in report.failures])
    _print_some(console, "skipped", [f"{source}: {reason}" for source, reason in report.skipped])
    _print_some(console, "indexed, but look at them", [f"{source}: {note}" for source, note in report.notes])
    kept = "still indexed though their files are gone (remove them with --prune)"
    _print_some(console, "removed because their files are gone" if pruned else kept, list(report.vanished))


def _print_some(console: Console, title: str, lines: list[str]) -> None:
    if not lines:
        return
    console.print(f"[yellow]{title}:[/yellow]")
    for line in lines[:_SHOWN_FAILURES]:
        console.print(f"  {escape(shown(line))}", highlight=False, soft_wrap=True)
    if len(lines) > _SHOWN_FAILURES:
        console.print(f"  and {len(lines) - _SHOWN_FAILURES:,} more (--json lists all)")
