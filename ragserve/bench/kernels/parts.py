"""Runs a kernel benchmark in parts, each written once measured, beside earlier results of the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.bench.kernels.timing import Row
from ragserve.errors import InvalidRequest
from ragserve.measuring import report

Part = Callable[[], list[Row]]


def chosen_parts(names: Sequence[str], parts: Sequence[str], what: str) -> list[str]:
    """Return ``names`` in the order of ``parts``; all parts if none is named.

    Raises:
        InvalidRequest: a name that is no part of this benchmark.
    """
    if unknown := [name for name in names if name not in parts]:
        raise InvalidRequest(
            f"`ragserve bench {what}` has no part {unknown[0]!r}.", hint=f"Choose from: {', '.join(parts)}."
        )
    return [part for part in parts if part in names] if names else list(parts)


def run_parts(
    name: str,
    parts: Mapping[str, Part],
    chosen: Sequence[str],
    *,
    workload: Mapping[str, Any],
    ceilings: Mapping[str, float],
    note: str,
    out_dir: Path | None,
) -> dict[str, Any]:
    """Measure the ``chosen`` of ``parts``, in order; returns the report.

    ``<out_dir>/<name>.json`` is written after each part. Rows that it already holds of parts not measured now
    are kept; ``measured`` in its workload says for every part when, on what and under which ceilings (GB/s)
    it was measured."""
    import torch
    import triton

    out = out_dir / f"{name}.json" if out_dir else None
    rows, measured = _earlier(out, parts)
    environment = report.environment()
    here = {
        "date": environment["date"],
        "gpu": environment["gpu"],
        "torch": torch.__version__,
        "triton": triton.__version__,
        **ceilings,
    }
    result: dict[str, Any] = {}
    for part in chosen:
        started = time.perf_counter()
        fresh = [{"operation": part, **row} for row in parts[part]()]
        for row in fresh:
            print(json.dumps(row, ensure_ascii=False), flush=True)
        seconds = round(time.perf_counter() - started)
        print(f"{part}: {seconds} s", flush=True)
        rows[part] = fresh
        measured[part] = {**here, "seconds": seconds}
        result = {
            "benchmark": name,
            "workload": {
                **workload,
                "measured": {each: measured[each] for each in parts if each in measured},
            },
            "environment": environment,
            "rows": [row for each in parts for row in rows.get(each, [])],
            "note": note,
        }
        if out is not None:
            report.save(result, out)
        torch.cuda.empty_cache()
    if out is not None:
        print(f"written: {out}", flush=True)
    return result


def _earlier(out: Path | None, parts: Mapping[str, Part]) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Return what ``out`` holds of ``parts``: rows, and where each part was measured."""
    if out is None or not out.exists():
        return {}, {}
    try:
        before = json.loads(out.read_text(encoding="utf-8"))
        rows = {part: [row for row in before["rows"] if row["operation"] == part] for part in parts}
        measured = dict(before["workload"]["measured"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f"{out} is not a report of this benchmark: {error!r}.",
            hint="Move it away, or give another folder with --out.",
        ) from error
    return {part: found for part, found in rows.items() if found}, measured
