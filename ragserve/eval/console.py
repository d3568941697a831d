"""Progress bar of measurements on question sets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ragserve.progress_lines import progress_lines


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Any]:
    """Show a bar on stderr, or lines where that is no terminal; yields ``step(done=None, total=None,
    what=None)``, which advances it by one, or sets it and its name."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        with progress_lines() as now:
            yield _counted(now, what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def step(done: int | None = None, total: int | None = None, what: str | None = None) -> None:
            if done is None:
                bar.advance(task)
            else:
                bar.update(task, completed=done, total=total, description=what)

        yield step


def _counted(now: Callable[[str, str], None], name: str, most: int | None) -> Callable[..., None]:
    """The ``step`` of `progress` that tells its counts to ``now``."""
    at = 0

    def step(done: int | None = None, total: int | None = None, what: str | None = None) -> None:
        nonlocal at, most, name
        at = at + 1 if done is None else done
        most, name = total or most, what or name
        tell()

    def tell() -> None:
        now(name, f"{at:,}" if most is None else f"{at:,} of {most:,}")

    tell()
    return step
