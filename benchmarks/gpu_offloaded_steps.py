"""Where the milliseconds of an offloaded decode step go: kernels, gaps of the device, and the scheduler's
thread.

    python -m benchmarks.gpu_offloaded_steps OUT.json [--points resident:13,offloaded:13,offloaded:41]
        [--context TOKENS] [--kv-gb GB] [--host-gb GB] [--steps 200] [--traced 40] [--attention NAME]
        [--embedded]

One engine of the shape of Llama-3.1-8B with random weights. At each point so many requests of random tokens
decode, with their KV on the device or offloaded, by a budget of 2,048 tokens and a lag of 2; once all do, and
offloaded ones have moved, ``--steps`` steps are timed in the engine's process (step_times.py), and as many
again when all answers have ``--later`` tokens: functions of the scheduler's thread, and how long that waits
for the device. If it hardly waits, a step lasts as long as it takes. ``--traced`` steps more are recorded by
torch's
profiler: the time of each kernel, and for how long nothing runs. OUT has a row for each point, and all
kernels and functions. Three minutes, of which prefills take half; the profiler slows the steps that it
records. ``--embedded``: the small model and few short requests, to try it without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.gpu_offloaded import request_of, slots_of
from benchmarks.lib import step_times
from benchmarks.lib.fan_out import engine_args
from ragserve.bench import model_shapes
from ragserve.verification import report
from ragserve.verification.engine_run import random_tokens

if __name__ == "__mp_main__":  # a process of the engine
    step_times.install()

LAG, SETTLE_S, LIMIT_S = 2, 1.0, 240.0
NOTE = (
    "step ms: without the profiler; first: soon after the last prefill. client ms: a token of an answer, "
    "where it is read, in the time of those steps. device busy, forward busy, traced ms: of the steps that "
    "the profiler recorded, in which a kernel or copy runs on any stream, and on that of the forward passes. "
    "waits: of the scheduler's thread for the device. Functions hold those that they call."
)


class Crowd:
    """Requests that decode until they are left."""

    def __init__(self, engine: Any, prompts: list[list[int]], answer: int, options: dict[str, Any]) -> None:
        self._tokens = [0] * len(prompts)
        self._sent = [
            asyncio.create_task(self._decode(engine, i, request_of("steps", ids, answer, options)))
            for i, ids in enumerate(prompts)
        ]

    async def _decode(self, engine: Any, i: int, request: Any) -> None:
        async with aclosing(engine.generate(request)) as stream:
            async for chunk in stream:
                self._tokens[i] = chunk.usage.completion

    @property
    def decoding(self) -> bool:
        for each in self._sent:
            if each.done():
                each.result()
                raise SystemExit("an answer ended before the measurement: ask for longer ones with --answer")
        return all(count > 1 for count in self._tokens)

    @property
    def tokens(self) -> int:
        return sum(self._tokens)

    @property
    def least(self) -> int:
        return min(self._tokens)

    async def leave(self) -> None:
        for each in self._sent:
            each.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)


async def until(what: str, ready: Any) -> None:
    begun = time.monotonic()
    while not await ready():
        if time.monotonic() - begun > LIMIT_S:
            raise SystemExit(f"{what}: not within {LIMIT_S:.0f} s")
        await asyncio.sleep(0.05)


async def measure(engine: Any, point: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a point, and its kernels and functions."""
    side, count = point.split(":")
    offloaded = side == "offloaded"
    draw = random.Random(5)  # every point asks with the same prompts: the prefix cache has some of them
    prompts = [random_tokens(draw, given.context) for _ in range(int(count))]
    options = {"mode": "hierarchical", "budget": given.budget, "lag": LAG, "offloaded": offloaded}
    crowd = Crowd(engine, prompts, given.answer, options)

    async def info() -> dict[str, Any]:
        return dict((await engine.control("info"))["decode"]["offloaded"])

    async def decoding() -> bool:
        return crowd.decoding and (not offloaded or (await info())["requests"] == int(count))

    async def idle() -> bool:
        now = await info()
        return not any(now[each] for each in ("requests", "copying", "used"))

    async def timed_steps(name: str, traced: int) -> dict[str, Any]:
        """Have steps timed; ``client ms``: how long one of the answers waits for a token meanwhile."""
        asked = {"name": name, "steps": given.steps, "traced": traced}
        (folder / "measure.part").write_text(json.dumps(asked), encoding="utf-8")
        (folder / "measure.part").rename(folder / "measure")
        before, begun = crowd.tokens, time.perf_counter()

        async def done() -> bool:
            return crowd.decoding and (folder / f"{name}.json").exists()

        await until(f"{name}: timed", done)
        client = (time.perf_counter() - begun) * 1e3 * int(count) / max(1, crowd.tokens - before)
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return dict(found | {"client ms": round(client, 3)})

    async def later() -> bool:
        return crowd.decoding and crowd.least >= given.later

    name = point.replace(":", "-")
    await until(f"{point}: all decode", decoding)
    await asyncio.sleep(SETTLE_S)
    first = await timed_steps(f"{name}-first", 0)
    await until(f"{point}: {given.later} tokens", later)
    timed = await timed_steps(name, given.traced)

    async def recorded() -> bool:
        return crowd.decoding and (folder / f"{name}.trace.json").exists()

    await until(f"{point}: recorded", recorded)
    now = await info()
    await crowd.leave()
    await until(f"{point}: left", idle)
    traced = step_times.read_trace(folder / f"{name}.trace.json", given.traced)
    waits = timed["host ms a step"].get(step_times.WAITS, 0.0)
    row = {
        "requests": int(count),
        "KV": "host" if offloaded else "device",
        "first step ms": round(first["ms a step"], 3),
        "step ms": round(timed["ms a step"], 3),
        "client ms": timed["client ms"],
        "waits": round(waits, 3),
        "traced ms": round(traced["ms"], 3),
        "device busy": round(traced["busy"], 3),
        "forward busy": round(traced["busy on its own stream"], 3),
        "loads a step": round(timed["calls a step"].get("OffloadedRows.load", 0.0), 3),
        "load ms": round(timed["host ms a step"].get("OffloadedRows.load", 0.0), 3),
        "resident_blocks": now["resident_blocks"],
        "host ms a step": {k: round(v, 4) for k, v in timed["host ms a step"].items()},
        "calls a step": {k: round(v, 3) for k, v in timed["calls a step"].items()},
        **{each: traced[each] for each in ("kernels", "beside", "launches")},
    }
    print(json.dumps(row)[:600], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--points", default="resident:13,offloaded:13,offloaded:41")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--answer", type=int, default=3000)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--kv-gb", type=float, default=52.0)
    parser.add_argument("--host-gb", type=float, default=90.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--later", type=int, default=500)
    parser.add_argument("--traced", type=int, default=40)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--embedded", action="store_true")
    given = parser.parse_args()
    given.shape = "embedded" if given.embedded else "llama-3.1-8b"
    given.offloaded_kv_gb = 0.0
    if given.embedded:
        given.points, given.context, given.answer = "resident:2,offloaded:2", 400, 200
        given.budget, given.page = 64, 16
        given.steps, given.traced, given.later = 4, 3, 8
        token = model_shapes.kv_bytes_per_token(given.shape)
        given.kv_gb, given.host_gb = 6000 * token / 1e9, 3000 * token / 1e9
    points = given.points.split(",")
    most = max(int(point.split(":")[1]) for point in points)
    settings: dict[str, Any] = {
        "max_total_tokens": slots_of("offloaded", given),
        "kv_disk_bytes": 0,
        "kv_host_bytes": 2**24,
        "kv_offload_bytes": int(given.host_gb * 1e9),
        "sparse_attention": "on",
        "decode_page_size": given.page,
        "decode_logical_page": 16,
        "decode_budget": given.budget,
        "decode_dense_below": 0,
        "engine_args": engine_args(given.attention) | {"max_running_requests": most},
    }
    if not given.embedded:
        sizes = sorted({int(point.split(":")[1]) for point in points})
        settings["engine_args"] |= {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, *sizes]}
    with tempfile.TemporaryDirectory(prefix="ragserve-steps-") as folder:
        os.environ[step_times.FOLDER] = folder

        async def work(engine: Any) -> list[dict[str, Any]]:
            return [await measure(engine, point, Path(folder), given) for point in points]

        rows = model_shapes.run_engine(given.shape, work, **settings)
    workload = {
        "model": f"{given.shape}, random weights" if not given.embedded else "ragserve-tiny",
        "context": given.context,
        "budget": given.budget,
        "lag": LAG,
        "steps timed, traced": f"{given.steps}, {given.traced}",
    }
    shown = [name for name in rows[0] if not isinstance(rows[0][name], dict)]
    report.write("offloaded-steps", workload, rows, out=given.out, note=NOTE, shown=shown)


if __name__ == "__main__":
    sys.exit(main())
