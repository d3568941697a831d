"""Requests a second that a CUDA machine serves with p99 TTFT within 2 s, and their KV slots, by strategy.

    python -m benchmarks.gpu_load OUT_FOLDER TRACE_FOLDER [--passages 48,5] [--seconds 360]
        [--strategies LIST]

TRACE_FOLDER holds a NAME.trace.jsonl with NAME.docs.jsonl[.gz] beside it (see
`ragserve.bench.retrieval_trace`). Runs `ragserve.bench.load` with the shape of Llama-3.1-8B and random
weights on one engine; OUT_FOLDER/load-llama-3.1-8b.json is written after each strategy. ``--seconds`` bounds
the time after the engine's start, of which FlashInfer takes about two minutes on a new machine. Needs SGLang
(0.5.17 was run there) and this project, installed without dependencies so that SGLang finds its plugin.
Exits with 1 if a
strategy failed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.lib.fan_out import engine_args
from ragserve.bench import load
from ragserve.bench.load import Effort


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument(
        "--passages", default="48", help="of one query, separated by commas; 0: as many as the trace has"
    )
    parser.add_argument("--queries", type=int, default=120)
    parser.add_argument("--strategies", default=load.STRATEGIES)
    parser.add_argument("--arrivals-s", type=float, default=15.0, help="of each rate")
    parser.add_argument("--rates", type=int, default=4, help="tried for each strategy")
    parser.add_argument("--first", type=float, default=0.8, help="rate, in shares of a closed loop's")
    parser.add_argument("--step", type=float, default=1.35, help="from a rate that is served to the next")
    parser.add_argument(
        "--skip-full-rate", action="store_true", help="do not try each strategy at the rate of full as well"
    )
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument(
        "--prefill",
        default="auto",
        choices=("auto", "fa2"),
        help="kernels of FlashInfer's prefill, see the setting prefill_kernels",
    )
    parser.add_argument(
        "--attention",
        default="flashinfer",
        help="FlashInfer compiles for two minutes on a new machine; or triton",
    )
    parser.add_argument(
        "--shape", default="llama-3.1-8b", help="or embedded: the small model, to try this without a GPU"
    )
    parser.add_argument("--http", action="store_true", help="ask a worker over HTTP")
    parser.add_argument("--page-bits", type=int, default=16, help="of host pages, see kv_page_bits")
    parser.add_argument("--engine", type=json.loads, default={}, help="further SGLang options, as JSON")
    options = parser.parse_args()
    started = time.monotonic()
    gpu = engine_args(options.attention) if options.shape != "embedded" else {}
    settings = {"mem_fraction_static": 0.75} if gpu else {}
    report = load.run(
        options.out,
        traces=sorted(options.traces.glob("*.trace.jsonl")),
        n_queries=options.queries,
        passages=[int(n) for n in options.passages.split(",")],
        strategies=options.strategies,
        shape=options.shape,
        effort=Effort(
            options.arrivals_s,
            options.rates,
            first=options.first,
            step=options.step,
            at_full=not options.skip_full_rate,
            seconds=options.seconds,
        ),
        over_http=options.http,
        prefill_kernels=options.prefill,
        kv_page_bits=options.page_bits,
        engine_args=gpu | options.engine,
        **settings,
    )
    failed = [row for row in report["rows"] if "error" in row]
    print(f"{len(report['rows'])} rows, {len(failed)} failed, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
