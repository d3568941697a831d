"""One and two GPUs of one host beside each other: first tokens of composed contexts, and decode steps.

    export RAGSERVE_ATTENTION=flashinfer
    for tp in 1 2; do
        python -m benchmarks.gpu_context OUT/context-$tp --part speed --tp $tp --lengths 8192,32768,102400 \\
            --document-tokens 1024 --tiers device,host --strategies full,concat,samkv \\
            --without "all kept,sentences 5" \\
            --engine '{"cuda_graph_max_bs_decode": 8, "cuda_graph_max_bs_prefill": 512}'
        python -m benchmarks.gpu_decode OUT/decode-$tp ragserve --points 32768x8,100000x2 --tp $tp
    done
    python -m benchmarks.gpu_two OUT h100-two-gpus.json [--merge EARLIER.json]

The last joins what the others have written. All runs must be of one machine; where only the first tokens or
only the decode steps were measured, `--merge` takes the others from an earlier report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragserve.verification import report

GPUS = (1, 2)
Runs = dict[int, dict[str, Any]]
NOTE = (
    "Milliseconds: until the first token (medians), or of a decode step. share: two GPUs' over one's. "
    "full: SGLang's prefill, its fastest chunking was not looked for. Random weights."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="OUT, with context-1, context-2, decode-1 and decode-2")
    parser.add_argument("out", type=Path)
    parser.add_argument("--merge", type=Path, help="an earlier report, whose rows stay unless measured now")
    given = parser.parse_args()
    first = read(given.runs, "context-{}/context-llama-3.1-8b.json")
    steps = read(given.runs, "decode-{}/decode.json")
    runs = first or steps
    gpus = {ran["environment"]["gpu"] for ran in first.values()}
    gpus |= {engine["gpu"] for ran in steps.values() for engine in ran["engines"].values()}
    if not runs or len(gpus) > 1:
        parser.error(f"runs of several machines: {gpus}" if runs else f"no pair of runs in {given.runs}")
    rows = [*(first_tokens(first) if first else ()), *(decode_steps(steps) if steps else ())]
    measured = {row["what"] for row in rows}
    rows += [row for row in report.read_report(given.merge)[1] if row["what"] not in measured]
    workload = {
        key: value
        for key, value in runs[2]["workload"].items()
        if key in ("model", "attention", "system tokens", "question tokens")
    }
    report.write("two GPUs", workload, rows, out=given.out, note=NOTE, ran_on=runs[2].get("environment"))


def read(folder: Path, name: str) -> Runs:
    """Return the reports of both runs; empty if one of them is missing."""
    paths = {n: folder / name.format(n) for n in GPUS}
    if not all(path.exists() for path in paths.values()):
        return {}
    return {n: json.loads(path.read_text()) for n, path in paths.items()}


def first_tokens(runs: Runs) -> Iterator[dict[str, Any]]:
    for (tokens, strategy, tier), *ms in both(runs, ("context tokens", "strategy", "tier"), "ttft ms"):
        yield row_of("first token", tokens, f"{strategy}, {tier}" if tier else strategy, *ms)


def decode_steps(runs: Runs) -> Iterator[dict[str, Any]]:
    for (tokens, batch, mode), *ms in both(runs, ("context", "batch", "mode"), "ms a step"):
        yield row_of(f"step of {batch}", tokens, mode, *ms)


def both(runs: Runs, case: Sequence[str], figure: str) -> Iterator[tuple[tuple[Any, ...], float, float]]:
    """The cases that both have measured, and the figure of each."""
    one, two = ({tuple(row[name] for name in case): row.get(figure) for row in runs[n]["rows"]} for n in GPUS)
    for key, ms in one.items():
        if ms is not None and two.get(key) is not None:
            yield key, ms, two[key]


def row_of(what: str, tokens: int, how: str, one: float, two: float) -> dict[str, Any]:
    return {
        "what": what,
        "context tokens": tokens,
        "how": how,
        "one GPU ms": one,
        "two GPUs ms": two,
        "share": round(two / one, 2),
    }


if __name__ == "__main__":
    main()
