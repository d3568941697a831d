"""Answer quality of every strategy on a GPU machine, over all question sets, with several engines on one GPU.

    python -m benchmarks.gpu_eval OUT_DIR SETS_DIR [--engines 5] [--limit N] [--only SET,SET] [--strategies
        LIST] [--first N] [--seconds 480] [--model FOLDER] [--benchmark short-answers] [--half first]
        [--tier host]

Does what `ragserve eval` does, on machines that have SGLang and this checkout on the path but not the rest of
the product. Rows are written to OUT_DIR/rows-*.jsonl at once; after ``--seconds``, or on any failure, the
report covers the rows there are, and the same command continues where it stopped. ``--first``: all questions
are asked under the first N strategies before any under the others. OUT_DIR/ragserve-gate.json
says which strategies are verified: copy it into a data folder, or beside the model; a benchmark, which does
not compare distributions, writes none. `passages` and `samkv` need an embedder (RAGSERVE_EMBEDDER: name or
folder). The attention backend is SGLang's default unless RAGSERVE_ATTENTION names another."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.lib.fan_out import engine_args
from ragserve.config import load
from ragserve.errors import RagserveError
from ragserve.eval.data import find
from ragserve.eval.gate_records import measured
from ragserve.eval.parallel import Plan, known, run
from ragserve.eval.presets import BENCHMARKS, expanded, fixed_by
from ragserve.eval.summary import write
from ragserve.profiles import gate
from ragserve.strategy_spec import parse

SETS = "onehop,crossdoc,mid_onehop,mid_crossdoc,long_onehop,long_crossdoc,needle,2wikimqa,musique"
STRATEGIES = (
    "full,prefix,concat,concat:experimental.rotate=false,concat:recompute=all,epic:first=16,epic:first=32,"
    "cacheblend:share=0.1,cacheblend:share=0.15,cacheblend:share=0.3,"
    "concat:recompute=question,share=0.15,concat:recompute=anchors,share=0.15,"
    "random:share=0.15,random:share=0.3,random:share=0.5"
)
TOKENS = 24  # of an answer
POOL_TOKENS = 400_000  # per engine: 12 questions in flight with 8k document tokens, composed twice


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("out", type=Path)
    options.add_argument("sets", type=Path)
    options.add_argument("--engines", type=int, default=5)
    options.add_argument("--in-flight", type=int, default=12)
    options.add_argument("--limit", type=int, default=None)
    options.add_argument("--only", default=SETS)
    options.add_argument("--strategies", help="default: the benchmark's, or many")
    options.add_argument("--model", help="default: the embedded one")
    options.add_argument("--benchmark", choices=tuple(BENCHMARKS))
    options.add_argument("--half", choices=("first", "second"))
    options.add_argument("--tier", choices=("device", "host"), default="device")
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seconds", type=float, default=480)
    given = options.parse_args()
    # Small CUDA graphs: start-up matters more here than the last millisecond of decoding.
    graphs = {"cuda_graph_max_bs_decode": 16, "disable_prefill_cuda_graph": True}
    model = {"model": given.model} if given.model else {}
    settings = load(max_total_tokens=POOL_TOKENS, engine_args=graphs | engine_args(None), **model)
    default = "" if given.benchmark else STRATEGIES
    settings, tokens, strategies = fixed_by(given.benchmark, settings, None, given.strategies or default)
    paths = [find(name, given.sets) for name in given.only.split(",")]
    plan = Plan(
        paths,
        parse(expanded(strategies)),
        settings,
        given.limit,
        tokens or TOKENS,
        in_flight=given.in_flight,
        workers=given.engines,
        seconds=given.seconds,
        first=given.first,
        half=given.half,
        compare=given.benchmark is None,
        tier=given.tier,
        benchmark=given.benchmark,
    )
    started, shown = time.monotonic(), [0.0]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - shown[0] > 10:
            shown[0] = time.monotonic()
            print(f"{shown[0] - started:5.0f} s  {done} of {total} answers", flush=True)

    broken = False
    try:
        rows, served = run(plan, given.out, progress)
    except RagserveError as error:
        print(error, file=sys.stderr)
        broken = True
        rows, served = known(plan, given.out)
    report = write(plan, rows, served, given.out / "eval.json")
    if plan.compare:
        entries = measured(report)
        gate.record(given.out / gate.FILE_NAME, served["engine"]["fingerprint"], entries)
        verified = [label for label, entry in entries.items() if entry.verifies()]
        print("verified: " + (", ".join(verified) or "none"))
    cut = sum(row["documents_dropped"] for row in report["rows"])
    failed = sum(row["failed"] for row in report["rows"])
    took = f"{time.monotonic() - started:.0f} s"
    print(f"{len(rows)} answers; {failed} failed; {cut} documents did not fit; {took}")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
