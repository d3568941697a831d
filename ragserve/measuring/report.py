"""What every benchmark prints and writes: where it ran, on what, what it measured, beside which rival."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ragserve.files import write_json

_PACKAGES = ("ragserve", "sglang", "torch", "transformers", "faiss-cpu", "sentence-transformers", "numpy")

_LOG_COLUMNS = 200  # of a table that goes to a file


def environment() -> dict[str, Any]:
    """Hardware and versions of this run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    gpu = None
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        gpu = sys.modules["torch"].cuda.get_device_name(0)
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between samples."""
    import numpy as np

    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def assemble(
    name: str,
    workload: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    note: str = "",
    ran_on: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``{benchmark, workload, environment, rows, note}``. ``ran_on``: the environment measured, where that is
    not this process's.
    """
    report: dict[str, Any] = {
        "benchmark": name,
        "workload": dict(workload),
        "environment": dict(ran_on or environment()),
    }
    return report | {"rows": [dict(row) for row in rows], "note": note}


def write(
    name: str,
    workload: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    out: Path | None,
    note: str = "",
    ran_on: Mapping[str, Any] | None = None,
    shown: Sequence[str] = (),
) -> dict[str, Any]:
    """Print ``rows`` as a table and, with ``out``, write what :func:`assemble` makes of them there.
    ``shown``: columns to print (all).
    """
    report = assemble(name, workload, rows, note=note, ran_on=ran_on)
    console = Console(width=None if sys.stdout.isatty() else _LOG_COLUMNS)
    console.print(f"[bold]{name}[/bold]  " + ", ".join(f"{k}: {v}" for k, v in workload.items()))
    table = Table()
    columns = list(shown) or list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(
            column, justify="right" if any(isinstance(r.get(column), (int, float)) for r in rows) else "left"
        )
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)
    env = report["environment"]
    console.print(f"{env['cpu']}, {env['cores']} cores, GPU: {env['gpu'] or 'none'}; {env['versions']}")
    if note:
        console.print(note)
    if out is not None:
        save(report, out)
        console.print(f"written: {out}")
    return report


def save(report: Mapping[str, Any], out: Path) -> None:
    """Write a report as JSON, atomically; the folder is made."""
    write_json(out, report)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)
