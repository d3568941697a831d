"""Progress bar of measurements on question sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Any]:
    """Show a bar on stderr; yields ``step(done=None, total=None, what=None)``, which advances it by one, or
    sets it and its name."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def step(done: int | None = None, total: int | None = None, what: str | None = None) -> None:
            if done is None:
                bar.advance(task)
            else:
                bar.update(task, completed=done, total=total, description=what)

        yield step
