"""What an evaluation shows while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Any]:
    """A bar on stderr; yields the function that moves it by one, or to the given place (of so many)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def step(done: int | None = None, total: int | None = None) -> None:
            bar.update(task, completed=done, total=total) if done is not None else bar.advance(task)

        yield step
