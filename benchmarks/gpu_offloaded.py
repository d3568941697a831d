"""Tokens a second and requests held at once with equal device memory: plain SGLang, sparse decoding with its
KV on the device, offloaded, and naive offloading.

    python -m benchmarks.gpu_offloaded OUT [SIDES ...] [--points POINT,...] [--kv-gb GB] [--host-gb GB]
        [--offloaded-kv-gb GB] [--inject TOKENS] [--budget TOKENS] [--lag STEPS] [--resident-blocks N]
        [--attention NAME] [--merge EARLIER.json] [--embedded]

SIDES: plain, resident, offloaded, naive, each an engine of its own. Sides that are joined, such as
plain+resident, start at the same time and measure one after another, which needs memory for all of them; the
next SIDES start when they have ended. Default: plain+resident+offloaded naive. Naive: resident blocks of two
pages for each of a choice, chosen anew in every second step, and steps wait for loads; it pins as much host
memory as offloaded.

POINT, default 32k,fits,100k,beside:
  32k     18 prompts of 32,768 tokens and answers of 1,024, all at once; they wait until the pool has room
  fits    3 of 32,768 and answers of 512: they fit on the device. Offloaded is asked for as `auto`
  100k    4 of 100,000 and answers of 512
  five    25 of 32,768, answers of 1,024: five times plain SGLang's in 24 GB, ``--host-gb 108
  --resident-blocks 1`` beside  one prompt of 120,000 tokens, sent while 4 requests of 8,192 decode. On the
          offloaded side it is larger than the room in the pool and is prefilled layer by layer; on the others
          in chunks
  late    16 prompts of 32,768 tokens, one every 2.5 s, while 6 requests of 8,192 decode with their KV on the
          device. ``--offloaded-kv-gb 12.8 --host-gb 25`` leaves no room for them on the offloaded side
  full    as many of 32,768 with answers of 1,024 as the offloaded side holds by ``--kv-gb`` and
          ``--host-gb``, on the host and on the device: for a pool of all memory that there is
  held    as many of these as each side holds by itself, so that none waits for room
Contexts are random tokens that nobody has sent before. ``--kv-gb``: device memory of the KV pool and of all
page statistics together, ``--offloaded-kv-gb``: on the offloaded side, if that is to have less;
``--host-gb``: pinned memory of the offloaded side. Llama-3.1-8B shape with random weights, so nothing is said
on quality.

OUT gets offloaded-SIDE.json after each point, and h200-offloaded.json of all that are there, those of earlier
runs included; ``--merge`` adds the rows of a report that none of them has. ``tokens/s`` is over the times in
which as many requests decoded at once as ever did, ``in all`` over the whole run, prefills included; ``step
ms`` is a token of one of those requests. ``gap``: milliseconds between two chunks of those that decode, from
the first prompt of `beside` or `late` to the last one's first token. ``--embedded``: the small model and
small sizes, to try the script without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import engine_args, this_script
from benchmarks.lib.held_at_once import overlap, tokens_between
from ragserve.bench import model_shapes
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.local import LocalEngine
from ragserve.files import write_json
from ragserve.verification import report
from ragserve.verification.engine_run import TimedAnswer, first_token, random_tokens
from sglang_ext.kv_offload.host.copy_stream import COPIES_VARIABLE

SIDES = ("plain", "resident", "offloaded", "naive")
GROUPS = ("plain+resident+offloaded", "naive")
DEFAULT_POINTS = "32k,fits,100k,beside"
FIRST_COLUMNS = 2  # per page of a choice
OFFLOADED = ("offloaded", "naive")
LOGICAL = 16
START_S = 420.0  # to wait for an engine's start
NOTE = (
    "tokens/s and step ms: over the times in which as many requests decoded at once as ever did. tokens/s in "
    "all: over the whole run, prefills included. plain: SGLang's own attention over the whole KV."
)


@dataclass(frozen=True)
class Point:
    """``requests``: 0: as many as the offloaded side holds. ``beside``: tokens of ``late`` prompts that come
    while the requests decode, one ``every`` so many seconds; 0: none comes. ``offloaded``: of the requests,
    the late ones are always offloaded."""

    requests: int
    context: int
    answer: int
    beside: int = 0
    late: int = 1
    every: float = 0.0
    offloaded: bool | str = True

    @property
    def at_once(self) -> int:
        return self.requests + (self.late if self.beside else 0)


POINTS = {
    "32k": Point(18, 32_768, 1024),
    "fits": Point(3, 32_768, 512, offloaded="auto"),
    "100k": Point(4, 100_000, 512),
    "five": Point(25, 32_768, 1024),
    "beside": Point(4, 8192, 6000, beside=120_000),
    "late": Point(6, 8192, 4000, beside=32_768, late=16, every=2.5, offloaded=False),
    "full": Point(0, 32_768, 1024),
    "held": Point(0, 32_768, 1024),
}
EMBEDDED = {  # a pool of 4,000 tokens, less what resident_blocks' statistics take
    "32k": Point(6, 1200, 48),
    "fits": Point(2, 1200, 32, offloaded="auto"),
    "100k": Point(2, 3000, 32),
    "five": Point(7, 1200, 48),
    "beside": Point(2, 300, 96, beside=3900),
    "late": Point(2, 600, 120, beside=2600, late=3, every=2.0, offloaded=False),
    "full": Point(0, 1200, 32),
    "held": Point(0, 1200, 32),
}


def most_held(side: str, given: argparse.Namespace, point: Point) -> int:
    """Return how many requests of a point a side has room for; the offloaded ones have it on the host as long
    as there are pages, and then on the device."""
    if side not in OFFLOADED:
        return slots_of(side, given) // (point.context + point.answer)
    pages = -(-point.context // given.page)
    page_bytes = given.page * model_shapes.kv_bytes_per_token(given.shape)
    on_host = int(given.host_gb * 1e9 // page_bytes) // pages
    resident_blocks = given.resident_blocks or FIRST_COLUMNS
    slots = slots_of(side, given) - on_host * (resident_blocks * given.budget + point.answer)
    if slots < 0:
        raise SystemExit("--kv-gb has no room for the resident blocks of what --host-gb holds")
    return on_host + slots // (point.context + point.answer)


def statistics_share(page: int) -> float:
    """Bytes of page statistics per byte of KV: see docs/sparse-decoding.md."""
    return 1 / LOGICAL + 1 / (2 * page)


def slots_of(side: str, given: argparse.Namespace) -> int:
    """Return the tokens of a side's KV pool."""
    share = statistics_share(given.page)
    room = given.kv_gb * 1e9
    if side in OFFLOADED:
        room = (given.offloaded_kv_gb or given.kv_gb) * 1e9 - share * given.host_gb * 1e9
    if side != "plain":
        room /= 1 + share
    return int(room / model_shapes.kv_bytes_per_token(given.shape)) // given.page * given.page


def settings_of(side: str, given: argparse.Namespace) -> dict[str, Any]:
    tokens = slots_of(side, given)
    flags: dict[str, Any] = {"max_total_tokens": tokens, "kv_disk_bytes": 0, "kv_host_bytes": 2**24}
    most = max(point.at_once for point in given.sizes.values())
    flags["engine_args"] = engine_args(given.attention) | {"max_running_requests": most}
    if side != "plain":
        flags |= {"sparse_attention": "on", "decode_page_size": given.page, "decode_logical_page": LOGICAL}
        flags |= {"decode_budget": given.budget, "decode_dense_below": 0}
    if side in OFFLOADED:
        flags |= {"decode_offload": "on", "kv_offload_bytes": int(given.host_gb * 1e9)}
        if given.inject:
            flags["max_inject_tokens"] = given.inject
    if not given.embedded:
        sizes = sorted({1, 2, 4, *range(8, most + 1, 8), most})
        flags["engine_args"] |= {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": sizes}
    return flags


async def watch(engine: Any, seen: list[dict[str, Any]]) -> None:
    """Note once a second what offloaded requests hold, and what bounds their number."""
    while True:
        offloaded = (await engine.control("info"))["decode"]["offloaded"]
        seen.append({"s": round(time.perf_counter(), 1)} | offloaded)
        await asyncio.sleep(1)


def decode_options(side: str, given: argparse.Namespace, offloaded: bool | str) -> dict[str, Any] | None:
    if side == "plain":
        return None
    options: dict[str, Any] = {"mode": "hierarchical", "budget": given.budget}
    if side in OFFLOADED and not offloaded:
        options |= {"offloaded": False, "lag": given.lag}
    elif side == "offloaded":
        options |= {"offloaded": offloaded, "lag": given.lag, "resident_blocks": given.resident_blocks}
    elif side == "naive":
        options |= {"offloaded": True, "lag": 1, "resident_blocks": 2, "reuse": 1}
    return options


def measure(side: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start the side's engine, wait for leave to measure, and measure every point."""
    found: dict[str, Any] = {"side": side, "settings": settings_of(side, given)}
    if side == "naive":
        os.environ[COPIES_VARIABLE] = "in-step"

    async def work(engine: LocalEngine) -> None:
        warm = [
            request_of("warm", random_tokens(random.Random(7), 64), 16, decode_options(side, given, True))
            for _ in range(2)
        ]
        await asyncio.gather(*(first_token(engine, each) for each in warm))
        (given.out / f"ready-{side}").touch()
        while not (given.out / f"go-{side}").exists():  # noqa: ASYNC110 - made by another process
            await asyncio.sleep(0.2)
        found["environment"] = report.environment()
        found["engine"] = {"device": engine.info.device, "attention": engine.info.attention_backend}
        earlier = given.out / f"offloaded-{side}.json"
        found["points"] = json.loads(earlier.read_text())["points"] if earlier.exists() else {}
        for name, point in given.sizes.items():
            measured = await measure_point(engine, side, name, point, given)
            measured["KV slots"] = found["settings"]["max_total_tokens"]
            found["points"][name] = measured
            print(side, name, {k: v for k, v in found["points"][name].items() if k != SECONDS}, flush=True)
            write_json(given.out / f"offloaded-{side}.json", found)
        if side in OFFLOADED:
            await engine.control("check")
            found["resident_blocks and statistics checked"] = True

    model_shapes.run_engine(given.shape, work, **found["settings"])
    return found


SECONDS = "offloading, by second"
WAITS = "late first token ms"  # a list
COUNTS = ("segmented tokens", "hits", "misses", "loaded GB")


def request_of(id: str, ids: list[int], answer: int, options: dict[str, Any] | None) -> GenerateRequest:
    sampling = Sampling(max_new_tokens=answer, ignore_eos=True)
    return GenerateRequest(id, ids, "bench", "prefix", sampling, decode=options)


async def measure_point(
    engine: LocalEngine, side: str, name: str, point: Point, given: argparse.Namespace
) -> dict[str, Any]:
    draw = random.Random(f"{name} of {given.shape}")
    options = decode_options(side, given, point.offloaded)
    requests = [
        request_of(name, random_tokens(draw, point.context), point.answer, options)
        for _ in range(point.requests)
    ]
    found: dict[str, Any] = {}
    seen: list[dict[str, Any]] = []
    watching = asyncio.create_task(watch(engine, seen)) if side in OFFLOADED else None
    started = time.perf_counter()
    sent = [asyncio.create_task(first_token(engine, request)) for request in requests]
    late: list[TimedAnswer] = []
    if point.beside:
        await asyncio.sleep(given.settle)  # until all of them decode
        coming = decode_options(side, given, True)
        prompts = [random_tokens(draw, point.beside) for _ in range(point.late)]
        behind = []
        for number, ids in enumerate(prompts):
            await asyncio.sleep(point.every if number else 0)
            behind.append(asyncio.create_task(first_token(engine, request_of("late", ids, 16, coming))))
        late = await asyncio.gather(*behind)
        waits = sorted(each.ttft_ms for each in late)
        found["late first token ms p50"] = round(statistics.median(waits), 1)
        found["late first token ms p99"] = round(report.percentile(waits, 99), 1)
        found[WAITS] = [round(each.ttft_ms, 1) for each in late]
        found["late segmented tokens"] = sum(
            each.last.decode.segmented_tokens for each in late if each.last.decode is not None
        )
    answers = await asyncio.gather(*sent)
    ended = time.perf_counter()
    if watching is not None:
        watching.cancel()
        found[SECONDS] = seen
    if point.beside:
        found |= gaps(answers, late)
    held, windows = overlap([(each.chunks[0][0], each.chunks[-1][0]) for each in answers])
    made = sum(tokens_between(each, *window) for each in answers for window in windows)
    full = sum(until - since for since, until in windows)
    found |= {"held": held, "held s": round(full, 3)}
    found["tokens a second"] = round(made / full, 1) if full else None
    found["step ms"] = round(1e3 * held * full / made, 3) if made else None
    found["tokens a second in all"] = round(point.requests * point.answer / (ended - started), 1)
    found["seconds"] = round(ended - started, 2)
    found["first token s"] = sorted(round(each.chunks[0][0] - started, 2) for each in answers)
    decode = [each.last.decode for each in answers if each.last.decode is not None]
    if decode:
        found["offloaded share of steps"] = sum(d.offloaded_steps for d in decode) / sum(
            d.steps for d in decode
        )
        found["segmented tokens"] = sum(d.segmented_tokens for d in decode)
        found["hits"], found["misses"] = sum(d.hits for d in decode), sum(d.misses for d in decode)
        found["working sets, pages"] = sorted(round(d.working_set, 1) for d in decode)
        found["resident_blocks, pages"] = sorted(d.resident_blocks for d in decode)
        found["loaded GB"] = round(sum(d.loaded_bytes for d in decode) / 1e9, 3)
    return found


def gaps(answers: list[TimedAnswer], late: list[TimedAnswer]) -> dict[str, float]:
    """Milliseconds between chunks of those who decode, while late prompts are prefilled and before that."""
    found: dict[str, float] = {}
    first = min(each.started for each in late)
    spans = {
        "alone": (max(each.chunks[0][0] for each in answers), first),
        "beside": (first, max(each.chunks[0][0] for each in late)),
    }
    for name, (since, until) in spans.items():  # gaps that begin in it
        waits = sorted(
            1e3 * (after - before)
            for each in answers
            for (before, _), (after, _) in pairwise(each.chunks)
            if since <= before < until
        )
        found[f"steps {name}"] = len(waits)
        if waits:
            found[f"gap ms {name} p50"] = round(statistics.median(waits), 2)
            found[f"gap ms {name} p99"] = round(waits[int(0.99 * (len(waits) - 1))], 2)
            found[f"gap ms {name} longest"] = round(waits[-1], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sides", nargs="*", default=[], help=f"default: {' '.join(GROUPS)}")
    parser.add_argument("--points", default=DEFAULT_POINTS, help=f"default: {DEFAULT_POINTS}")
    parser.add_argument("--kv-gb", type=float, default=24.0)
    parser.add_argument("--offloaded-kv-gb", type=float, default=0.0, help="default: as --kv-gb")
    parser.add_argument("--inject", type=int, default=0, help="max_inject_tokens; default: the server's")
    parser.add_argument("--host-gb", type=float, default=90.0)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument(
        "--resident-blocks", type=int, default=0, help="per page of a choice; 0: as they take"
    )
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument(
        "--merge", type=Path, help="a report of other sides or points, of a machine of this kind"
    )
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--side-process", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.shape = "embedded" if given.embedded else "llama-3.1-8b"
    known = EMBEDDED if given.embedded else POINTS
    given.settle = 6.0
    if given.embedded:
        token = model_shapes.kv_bytes_per_token(given.shape)
        given.budget, given.page, given.settle = 128, 16, 1.5
        given.kv_gb, given.host_gb = 4000 * token / 1e9, 9000 * token / 1e9
    groups = [each.split("+") for each in given.sides or GROUPS]
    points = given.points.split(",")
    if unknown := ({side for group in groups for side in group} - set(SIDES)) | (set(points) - set(known)):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; sides are {', '.join(SIDES)}, points {', '.join(known)}"
        )
    given.sizes = {name: known[name] for name in points}
    for name, point in given.sizes.items():
        if not point.requests:
            side = groups[0][0] if given.side_process and name == "held" else "offloaded"
            given.sizes[name] = replace(point, requests=most_held(side, given, point))
    given.out.mkdir(parents=True, exist_ok=True)
    if given.side_process:
        side = groups[0][0]
        write_json(given.out / f"offloaded-{side}.json", measure(side, given))
        return
    for group in groups:
        run_sides(group, given)
    written = [given.out / f"offloaded-{side}.json" for side in SIDES]
    found = [json.loads(path.read_text()) for path in written if path.exists()]
    workload = {
        "model": f"{given.shape}, random weights",
        "attention": found[0]["engine"]["attention"],
        "points, requests x context tokens, answer tokens": {
            name: f"{'its own' if name == 'held' else point.requests} x {point.context:,}, {point.answer}"
            for name, point in (known | given.sizes).items()
            if any(name in each["points"] for each in found)
        },
        "KV and statistics on the device, GB": round(given.kv_gb, 3),
        **({"the same, offloaded side": given.offloaded_kv_gb} if given.offloaded_kv_gb else {}),
        **({"max_inject_tokens": given.inject} if given.inject else {}),
        "pinned host memory, GB": round(given.host_gb, 3),
        "budget": given.budget,
        "lag": given.lag,
        "resident_blocks": given.resident_blocks or "as they take",
    }
    ran_on = found[0]["environment"]
    rows = [row_of(each, name) for name in known for each in found if name in each["points"]]
    measured = {(row["point"], row["side"]) for row in rows}
    rows += [r for r in report.read_report(given.merge)[1] if (r["point"], r["side"]) not in measured]
    rows.sort(key=lambda row: (list(known).index(row["point"]), SIDES.index(row["side"])))
    report.write("offloaded", workload, rows, out=given.out / "h200-offloaded.json", note=NOTE, ran_on=ran_on)


def run_sides(sides: list[str], given: argparse.Namespace) -> None:
    """Start all engines at once, a process each; when all of them have started, let one after another
    measure. One that fails is reported, and the others go on."""
    options = [each for each in sys.argv[2:] if each not in given.sides]
    for each in (*given.out.glob("ready-*"), *given.out.glob("go-*")):
        each.unlink()
    processes = {
        side: subprocess.Popen([*this_script(), str(given.out), side, "--side-process", *options])
        for side in sides
    }
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and not all(
        (given.out / f"ready-{side}").exists() or process.poll() is not None
        for side, process in processes.items()
    ):
        time.sleep(0.2)
    for side, process in processes.items():
        (given.out / f"go-{side}").touch()
        if process.wait():
            print(f"{side}: failed with {process.returncode}", flush=True)


def row_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a side's figures at a point as a row of the report."""
    at = found["points"][name]
    waits = at["first token s"]
    offloaded = found["side"] in OFFLOADED
    share = at.get("offloaded share of steps")
    return {
        "point": name,
        "side": found["side"],
        "held at once": at["held"],
        "held s": at.get("held s"),
        "tokens/s": at["tokens a second"],
        "step ms": at["step ms"],
        "tokens/s in all": at["tokens a second in all"],
        "seconds in all": at["seconds"],
        "first token s p50": statistics.median(waits),
        "last": waits[-1],
        "offloaded share of steps": round(share, 3) if offloaded and share is not None else None,
        **{key: at.get(key) if offloaded else None for key in COUNTS},
        **{key: value for key, value in at.items() if key.startswith(("late ", "gap ")) and key != WAITS},
        "KV slots": at["KV slots"],
    }


if __name__ == "__main__":
    main()
