"""The report that every benchmark prints and writes: workload, environment, and a row per measurement and
rival."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ragserve.errors import InvalidRequest
from ragserve.files import write_json
from ragserve.profiles.hardware import cpu_name, gpu_name

_PACKAGES = (
    *("ragserve", "sglang", "torch", "transformers"),
    *("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "sentence-transformers", "numpy"),
)

_LOG_COLUMNS = 200  # least width of what is printed to a file
_ANY_COLUMNS = 10_000


def environment() -> dict[str, Any]:
    """Hardware and versions of this run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu_name(),
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), interpolated linearly."""
    import numpy as np

    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def write(
    name: str,
    workload: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    out: Path | None,
    note: str = "",
    ran_on: Mapping[str, Any] | None = None,
    shown: Sequence[str] = (),
    narrow: Sequence[str] = (),
) -> dict[str, Any]:
    """Print ``rows`` as a table, write the report to ``out`` if given, and return it.

    Args:
        ran_on: The environment measured, if it is not this process's.
        shown: Columns to print; all by default.
        narrow: Columns to print where the terminal is narrower than the table. A file gets the width that the
            table needs.
    """
    report = assemble(name, workload, rows, note, ran_on)
    columns = list(shown) or list(dict.fromkeys(key for row in rows for key in row))
    table, console = fitted_table(rows, columns, narrow)
    console.print(f"[bold]{name}[/bold]  " + ", ".join(f"{k}: {v}" for k, v in workload.items()))
    console.print(table)
    env = report["environment"]
    console.print(f"{env['cpu']}, {env['cores']} cores, GPU: {env['gpu'] or 'none'}; {env['versions']}")
    if note:
        console.print(note)
    if out is not None:
        write_json(out, report)
        console.print(f"written: {out}")
    return report


def fitted_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], narrow: Sequence[str] = ()
) -> tuple[Table, Console]:
    """Make a table of ``rows`` and the console to print it to: as wide as the table where it is no terminal,
    and with the columns of ``narrow`` alone in a terminal that is narrower than the table."""
    table = _table(rows, columns)
    needed = Console(width=_ANY_COLUMNS).measure(table).maximum
    console = Console(width=None if sys.stdout.isatty() else max(needed, _LOG_COLUMNS))
    matter = [column for column in columns if column in narrow]
    if matter and needed > console.width:
        table = _table(rows, matter)
        table.caption = (
            f"{len(matter)} of {len(columns)} columns: {needed} characters of width show all, and a pipe does"
        )
    return table, console


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    table = Table()
    for column in columns:
        number = any(isinstance(row.get(column), (int, float)) for row in rows)
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


class GrowingReport:
    """A report that is printed row by row and rewritten after each row, so that an aborted run keeps what it
    measured.

    Rows of an earlier report stay unless a row with the same ``key`` columns is measured again."""

    def __init__(
        self,
        name: str,
        out: Path | None,
        *,
        note: str,
        key: Sequence[str] = (),
        earlier: Sequence[dict[str, Any]] = (),
        order: Callable[[dict[str, Any]], Any] = lambda row: 0,
    ) -> None:
        """``order``: sort key of all rows; rows that compare equal stay in the order of measurement."""
        self.workload: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []  # of this run
        self._name, self._out, self._note = name, out, note
        self._key, self._earlier, self._order = key, earlier, order
        self._started = time.monotonic()

    def add(self, row: dict[str, Any], **unprinted: Any) -> None:
        """Print a row and rewrite the file; ``unprinted`` columns go to the file only."""
        self.rows.append(row | unprinted)
        figures = "  ".join(f"{name}: {value}" for name, value in row.items())
        print(f"{time.monotonic() - self._started:.0f} s  {figures}", flush=True)
        if self._out is not None:
            write_json(self._out, assemble(self._name, self.workload, self._all(), self._note))

    def show(self, shown: Sequence[str] = (), *, narrow: Sequence[str] = ()) -> dict[str, Any]:
        """Print the whole table and return the report; see :func:`write`."""
        rows, out, note = self._all(), self._out, self._note
        return write(self._name, self.workload, rows, out=out, note=note, shown=shown, narrow=narrow)

    def _all(self) -> list[dict[str, Any]]:
        measured = {self._place(row) for row in self.rows}
        kept = [row for row in self._earlier if self._place(row) not in measured]
        return sorted([*kept, *self.rows], key=self._order)

    def _place(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(column) for column in self._key)


def assemble(
    name: str,
    workload: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    note: str,
    ran_on: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a report, of this process's environment by default."""
    return {
        "benchmark": name,
        "workload": dict(workload),
        "environment": dict(ran_on or environment()),
        "rows": [dict(row) for row in rows],
        "note": note,
    }


def read_report(out: Path | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the workload and rows of an earlier report, empty without a file. Raises InvalidRequest for a
    file that is no report."""
    if out is None or not out.exists():
        return {}, []
    try:
        before = json.loads(out.read_text(encoding="utf-8"))
        return dict(before["workload"]), list(before["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{out} is not a report of this benchmark: {error!r}.",
            hint="Move it away, or give another folder with --out.",
        ) from error


def measured_on(model: str) -> dict[str, str]:
    """The fields of a profile that say what was measured, where and when."""
    ran = environment()
    return {"model": Path(model).name, "hardware": ran["gpu"] or ran["cpu"], "date": ran["date"]}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)
