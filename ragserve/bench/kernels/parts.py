"""Runs a kernel benchmark in parts, each written once measured, beside earlier results of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.bench.kernels.timing import Row
from ragserve.errors import InvalidRequest
from ragserve.verification.report import GrowingReport, environment, read_report

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

    order = list(parts)
    out = out_dir / f"{name}.json" if out_dir else None
    before, earlier = read_report(out)
    measured = before.get("measured", {})
    report = GrowingReport(
        name,
        out,
        note=note,
        key=("operation",),
        earlier=[row for row in earlier if row["operation"] in order],
        order=lambda row: order.index(row["operation"]),
    )
    here = environment()
    for part in chosen:
        started = time.perf_counter()
        rows = list(parts[part]())
        measured[part] = {
            "date": here["date"],
            "gpu": here["gpu"],
            "torch": torch.__version__,
            "triton": triton.__version__,
            **ceilings,
            "seconds": round(time.perf_counter() - started),
        }
        report.workload = {
            **workload,
            "measured": {each: measured[each] for each in order if each in measured},
        }
        for row in rows:
            report.add({"operation": part, **row})
        torch.cuda.empty_cache()
    return report.show(("operation", "case", "variant", "ms", "of_ceiling"))
