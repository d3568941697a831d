"""Decode speed on an H200: our backend beside plain SGLang with FlashInfer and with its Triton kernels,
Llama-3.1-8B shape, CUDA graphs on.

    python -m benchmarks.gpu_decode OUT [BACKEND ...] [--gpus N] [--minutes M] [--threshold] [--short |
    --embedded]

BACKEND: ragserve, flashinfer, triton (these three by default), ragserve-8-bit (a KV pool of 8 bits),
ragserve-page-16 (pages of 16 tokens instead of 64). Each is an engine of its own, N of them at a time, each
on its own GPU. All three take eleven minutes on one GPU; with a shorter time limit, run two, and the third in
a second run with the same OUT. OUT gets decode-BACKEND.json after every row, and at the end, even if an
engine failed, decode.json with the speed-up over plain FlashInfer. The points that matter most come first;
those that would begin after ``--minutes`` are left out, which the file says. ``--threshold``: progressive
decoding as well. ``--short``: three points. ``--against-budget``: long contexts beside short ones, dense and
with the default budget. ``--observers``: what chooses pages, and by which scores. ``--embedded``: the small
model and short contexts, to try the script."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import fan_out, this_script
from ragserve.bench.decode import BACKENDS, OBSERVERS, OURS, run
from ragserve.files import write_json

# 16 x 100,000 tokens would be 210 GB of KV.
POINTS = (
    (32_768, 16),
    (32_768, 1),
    (32_768, 4),
    (100_000, 4),
    (100_000, 1),
    (8192, 1),
    (8192, 16),
    (8192, 4),
)
SHORT = ((32_768, 16), (100_000, 4), (8192, 1))
# A sparse step of a long context beside a dense one of as many tokens as it attends to.
AGAINST_BUDGET = ((32_768, 16), (2048, 16), (100_000, 4), (2048, 4))
SMALL = ((2600, 1), (2600, 2))


def child(backend: str, out: Path, given: argparse.Namespace) -> None:
    path = out / f"decode-{backend}.json"
    points = SHORT if given.short else AGAINST_BUDGET if given.against_budget else POINTS
    points = given.points or (SMALL if given.embedded else points)
    shape = "embedded" if given.embedded else "llama-3.1-8b"
    limits: dict[str, Any] = {"threshold": given.threshold, "until": given.until, "tp_size": given.tp}
    if given.against_budget:
        limits["modes"] = OURS[:2]
    if given.observers:
        limits["modes"] = OBSERVERS
    run(backend, points, write=lambda report: write_json(path, report), shape=shape, **limits)


def parent(out: Path, given: argparse.Namespace) -> int:
    out.mkdir(parents=True, exist_ok=True)
    extra = ["--embedded"] * given.embedded + ["--short"] * given.short + ["--threshold"] * given.threshold
    extra += ["--against-budget"] * given.against_budget + ["--observers"] * given.observers
    extra += ["--tp", str(given.tp)]
    if given.points:
        extra += ["--points", ",".join(f"{context}x{batch}" for context, batch in given.points)]
    if given.minutes is not None:
        extra += ["--until", str(time.monotonic() + 60 * given.minutes)]
    start = [*this_script(), str(out)]
    failed = fan_out({name: [*start, name, "--child", *extra] for name in given.backends}, given.gpus)
    merge(out)
    return len(failed)


def merge(out: Path) -> None:
    """Make one table of all backends measured so far, with the speed-up over plain SGLang with FlashInfer."""
    reports = [
        json.loads(path.read_text(encoding="utf-8"))
        for name in BACKENDS
        if (path := out / f"decode-{name}.json").exists()
    ]
    plain = {
        (r["context"], r["batch"]): r["ms a step"]
        for report in reports
        if report["backend"] == "flashinfer"
        for r in report["rows"]
    }
    rows = []
    for report in reports:
        for row in report["rows"]:
            rival = plain.get((row["context"], row["batch"]))
            faster = None if rival is None else round(rival / row["ms a step"], 2)
            rows.append({"backend": report["backend"], **row, "times flashinfer": faster})
    engines = {
        report["backend"]: {key: value for key, value in report.items() if key not in ("backend", "rows")}
        for report in reports
    }
    write_json(out / "decode.json", {"engines": engines, "rows": rows})
    for row in sorted(rows, key=lambda r: (r["context"], r["batch"], r["backend"], r["mode"])):
        print(row)


def points_of(text: str) -> list[tuple[int, int]]:
    """Context tokens and requests of each point, as of "32768x16,100000x4"."""
    pairs = [each.split("x") for each in text.split(",")]
    return [(int(context), int(batch)) for context, batch in pairs]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "backends", nargs="*", default=["ragserve", "flashinfer", "triton"], choices=list(BACKENDS)
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--threshold", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--against-budget", action="store_true")
    parser.add_argument("--observers", action="store_true")
    parser.add_argument("--points", type=points_of, help="TOKENSxREQUESTS,... instead")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of an engine")
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        child(given.backends[0], given.out, given)
        return 0
    return parent(given.out, given)


if __name__ == "__main__":
    raise SystemExit(main())
