"""Runs a kernel benchmark in parts, each written once measured, beside earlier results of the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.bench.kernels.timing import Row
from ragserve.errors import InvalidRequest
from ragserve.measuring import report

Part = Callable[[], Iterable[Row]]


def begin(bench: str, names: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Seed torch anew and return ``names`` in the order of ``parts``; all parts if none is named.

    Raises:
        InvalidRequest: a name that is no part of this benchmark; no CUDA device, because a kernel's time in
            the interpreter means nothing.
    """
    import torch

    if unknown := [name for name in names if name not in parts]:
        raise InvalidRequest(
            f"`ragserve bench {bench}` has no part {unknown[0]!r}.", hint=f"Choose from: {', '.join(parts)}."
        )
    if not torch.cuda.is_available():
        raise InvalidRequest(
            f"`ragserve bench {bench}` measures GPU kernels and found no CUDA device.",
            hint="Run it on a machine with one.",
        )
    torch.manual_seed(int(time.time()))
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
    rows: dict[str, list[Row]] = {}
    measured: dict[str, Any] = {}
    if out is not None and out.exists():
        with report.reading(out):
            before = json.loads(out.read_text(encoding="utf-8"))
            for row in before["rows"]:
                rows.setdefault(row["operation"], []).append(row)
            measured |= before["workload"]["measured"]
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
        known = {each: measured[each] for each in parts if each in measured}
        every = [row for each in parts for row in rows.get(each, [])]
        result = report.assemble(name, {**workload, "measured": known}, every, note, environment)
        if out is not None:
            report.save(result, out)
        torch.cuda.empty_cache()
    if out is not None:
        print(f"written: {out}", flush=True)
    return result
