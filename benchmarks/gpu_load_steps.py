"""Where the milliseconds of a request go while a server composes contexts for many clients.

    python -m benchmarks.gpu_load_steps OUT.json TRACE.trace.jsonl [--passages 16] [--at-once 32,64]
        [--strategies LIST] [--steps 200] [--traced 40] [--attention NAME] [--shape embedded]

One engine of the shape of Llama-3.1-8B with random weights, as gpu_load.py has it. For each strategy and
number of requests in flight, a closed loop runs; ``--steps`` decode steps are timed in the engine's process
with all that comes between them (step_times.py): functions of the scheduler's thread, and how long that waits
for the device. ``--traced`` steps more are recorded by torch's profiler: the time of each kernel, and for how
long the device does nothing. Figures are milliseconds a request: those of the time in which one is answered.
Two minutes without the engine's start. ``--shape embedded``: the small model, to try it without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_offloaded_steps import until
from benchmarks.lib import step_times
from benchmarks.lib.fan_out import engine_args
from ragserve.bench import model_shapes
from ragserve.bench.retrieval_trace import Trace, cache_in, read_trace
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.strategy_spec import StrategySpec, parse
from ragserve.verification import report
from sglang_ext.wire.protocol import EXACT_STRATEGIES

if __name__ == "__mp_main__":  # a process of the engine
    step_times.install()

NEW_TOKENS, SETTLE_S = 32, 4.0
NOTE = (
    "ms: the engine's time for one request, 1,000 over requests/s. device busy: of it, a kernel or copy runs "
    "on any stream (requests recorded by the profiler, which slows them: traced ms). waits: of the "
    "scheduler's thread for the device. Functions of `host ms` hold those that they call."
)


class Clients:
    """So many requests in flight, until they are left."""

    def __init__(self, engine: Any, make: Callable[[int], GenerateRequest], at_once: int) -> None:
        self.first = self.answered = 0
        self._engine, self._make, self._numbers = engine, make, itertools.count()
        self._sent = [asyncio.create_task(self._ask()) for _ in range(at_once)]

    async def _ask(self) -> None:
        while True:
            counted = False
            async with aclosing(self._engine.generate(self._make(next(self._numbers)))) as chunks:
                async for _ in chunks:
                    self.first += not counted
                    counted = True
            self.answered += 1

    def check(self) -> None:
        for each in self._sent:
            if each.done():
                each.result()

    async def leave(self) -> None:
        for each in self._sent:
            each.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)


def maker(trace: Trace, spec: StrategySpec, run: int) -> Callable[[int], GenerateRequest]:
    """The trace's queries in its order, by number, again and again."""
    namespace = f"run-{run}" if spec.name in EXACT_STRATEGIES else "load"
    sampling = Sampling(NEW_TOKENS, ignore_eos=True)
    requests = [q.request("load", namespace, spec.name, spec.options, sampling) for q in trace.queries]
    return lambda number: replace(requests[number % len(requests)], rid=f"steps-{run}-{number}")


async def measure(
    engine: Any, make: Callable[[int], GenerateRequest], at_once: int, folder: Path, given: argparse.Namespace
) -> dict[str, Any]:
    clients = Clients(engine, make, at_once)
    await asyncio.sleep(SETTLE_S if given.shape != "embedded" else 1.0)
    name = f"at-{time.monotonic_ns()}"
    asked = {"name": name, "steps": given.steps, "traced": given.traced}
    begun, before = time.perf_counter(), clients.answered
    (folder / "measure.part").write_text(json.dumps(asked), encoding="utf-8")
    (folder / "measure.part").rename(folder / "measure")

    async def timed_steps() -> bool:
        clients.check()
        return (folder / f"{name}.json").exists()

    async def recorded() -> bool:
        clients.check()
        return (folder / f"{name}.trace.json").exists()

    await until("timed", timed_steps)
    seconds, answered = time.perf_counter() - begun, clients.answered - before
    traced_at, before = time.perf_counter(), clients.answered
    await until("recorded", recorded)
    traced_seconds, traced_answered = time.perf_counter() - traced_at, clients.answered - before
    await clients.leave()
    timed = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    traced = step_times.read_trace(folder / f"{name}.trace.json", given.traced)
    a_request = timed["steps"] / max(1, answered)  # decode steps
    scale = seconds * 1e3 / max(1, answered) / timed["ms a step"]  # from a step to a request
    host = {k: round(v * scale, 3) for k, v in timed["host ms a step"].items()}
    traced_scale = traced_seconds * 1e3 / max(1, traced_answered) / traced["ms"] if traced else 0.0
    return {
        "in flight": at_once,
        "requests/s": round(answered / seconds, 2),
        "ms": round(1e3 * seconds / max(1, answered), 2),
        "decode steps": round(a_request, 3),
        "traced ms": round(traced.get("ms", 0.0) * traced_scale, 2),
        "device busy": round(traced.get("busy", 0.0) * traced_scale, 2),
        "waits": host.get(step_times.WAITS, 0.0),
        "host ms": host,
        "calls": {k: round(v * scale, 3) for k, v in timed["calls a step"].items()},
        **{
            each: {k: [round(x * traced_scale, 4) for x in v] for k, v in traced.get(each, {}).items()}
            for each in ("kernels", "beside", "launches")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--at-once", default="32,64")
    parser.add_argument("--strategies", default="full,samkv:keep=0.15,share=0.33")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--traced", type=int, default=40)
    parser.add_argument("--attention", default="flashinfer")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--engine", type=json.loads, default={}, help="further SGLang options, as JSON")
    given = parser.parse_args()
    small = given.shape == "embedded"
    trace = read_trace(given.trace, given.queries, DEFAULT_MODEL, passages=given.passages)
    tokens = trace.tokens + 32 * (len(trace.unique) + 1)
    settings: dict[str, Any] = {
        "kv_disk_bytes": 0,
        "kv_analysis_bytes": 4 * 2**30,
        "kv_host_bytes": tokens * model_shapes.kv_bytes_per_token(given.shape) + 2**28,
        "engine_args": ({} if small else engine_args(given.attention)) | given.engine,
    }
    if not small:
        settings["mem_fraction_static"] = 0.75
    rows: list[dict[str, Any]] = []
    workload = {
        "model": given.shape,
        "trace": f"{trace.name}, {len(trace.queries)} queries of {given.passages} passages",
        "answer tokens": NEW_TOKENS,
        "decode steps timed, traced": f"{given.steps}, {given.traced}",
    }
    shown = ["strategy", "in flight", "requests/s", "ms", "decode steps", "traced ms", "device busy", "waits"]
    with tempfile.TemporaryDirectory(prefix="ragserve-steps-") as folder:
        os.environ[step_times.FOLDER] = folder

        async def work(engine: Any) -> None:
            await cache_in(engine, "load", trace, "host")
            for spec in parse(given.strategies):
                for at_once in map(int, given.at_once.split(",")):
                    make = maker(trace, spec, len(rows))
                    row = await measure(engine, make, at_once, Path(folder), given)
                    rows.append({"strategy": spec.label, **row})
                    print(json.dumps(rows[-1])[:1500], flush=True)
                    report.write("load-steps", workload, rows, out=given.out, note=NOTE, shown=shown)

        model_shapes.run_engine(given.shape, work, **settings)


if __name__ == "__main__":
    main()
