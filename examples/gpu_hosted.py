"""Tokens a second and requests held at once with equal device memory: plain SGLang, sparse decoding with its
KV on the device, hosted, and naive offloading.

    python examples/gpu_hosted.py OUT [SIDE ...] [--context TOKENS] [--answer TOKENS] [--requests N]
        [--kv-gb GB] [--host-gb GB] [--budget TOKENS] [--lag STEPS] [--columns N] [--attention NAME]
        [--embedded]

SIDE: plain, resident, hosted, naive (all by default), each an engine of its own, one after another. Naive:
columns of two pages for each of a choice, chosen anew in every second step, and steps wait for loads. All
requests arrive at once, with contexts of random tokens that nobody has sent before, and wait in SGLang's
queue until the pool has room. ``--kv-gb``: device memory of the KV pool and of all page statistics together;
``--host-gb``: pinned memory of the hosted side. Llama-3.1-8B shape with random weights, so nothing is said on
quality.

OUT gets hosted-SIDE.json after each side and h200-hosted.json with all of them. ``tokens/s`` is over the
time in which as many requests decoded at once as ever did, ``in all`` over the whole run, prefills included;
``step ms`` is a token of one of those requests.
``--embedded``: the small model and small sizes, to try the script without a GPU."""

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
from pathlib import Path
from typing import Any

from fan_out import engine_args

from ragserve.bench import model_shapes
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.files import write_json
from ragserve.measuring import report
from ragserve.measuring.engine_run import TimedAnswer, first_token, random_tokens
from sglang_ext.hosting.beside import COPIES_VARIABLE

SIDES = ("plain", "resident", "hosted", "naive")
HOSTED = ("hosted", "naive")
LOGICAL = 16
NOTE = (
    "tokens/s and step ms: over the time in which as many requests decoded at once as ever did. tokens/s in "
    "all: over the whole run, prefills included. plain: SGLang's own attention over the whole KV."
)


def statistics_share(page: int) -> float:
    """Bytes of page statistics per byte of KV: see docs/sparse-decoding.md."""
    return 1 / LOGICAL + 1 / (2 * page)


def settings_of(side: str, given: argparse.Namespace) -> dict[str, Any]:
    token = model_shapes.kv_bytes_per_token(given.shape)
    share, host = statistics_share(given.page), given.host_gb * 1e9
    room = given.kv_gb * 1e9
    if side in HOSTED:
        room -= share * host
    if side != "plain":
        room /= 1 + share
    tokens = int(room / token) // given.page * given.page
    if tokens < given.context + given.answer:
        raise SystemExit(
            f"{side}: a pool of {tokens} tokens holds no prompt: more --kv-gb, or less --host-gb"
        )
    flags: dict[str, Any] = {"max_total_tokens": tokens, "kv_disk_bytes": 0, "kv_host_bytes": 2**24}
    flags["engine_args"] = engine_args(given.attention) | {"max_running_requests": given.requests}
    if side != "plain":
        flags |= {"sparse_attention": "on", "decode_page_size": given.page, "decode_logical_page": LOGICAL}
        flags |= {"decode_budget": given.budget, "decode_dense_below": 0}
    if side in HOSTED:
        flags |= {"decode_hosted": "on", "kv_hosted_bytes": int(host)}
    if not given.embedded:
        sizes = sorted({1, 2, 4, *range(8, given.requests + 1, 8), given.requests})
        flags["engine_args"] |= {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": sizes}
    return flags


def overlap(spans: list[tuple[float, float]]) -> tuple[int, float, float]:
    """Return the most spans at a time, and the first and the last moment with as many."""
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    since = until = 0.0
    for at, change in events:
        if now == most and change < 0 and now:
            until = at
        now += change
        if now > most:
            most, since = now, at
    return most, since, until


def tokens_between(answer: TimedAnswer, since: float, until: float) -> int:
    counts = [chunk.usage.completion for at, chunk in answer.chunks if since <= at <= until]
    return counts[-1] - counts[0] if counts else 0


async def watch(engine: Any, seen: list[dict[str, Any]]) -> None:
    """Note once a second what hosted requests hold, and what bounds their number."""
    while True:
        hosted = (await engine.control("info"))["decode"]["hosted"]
        seen.append({"s": round(time.perf_counter(), 1)} | hosted)
        await asyncio.sleep(1)


def measure(side: str, given: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(5)
    contexts = [random_tokens(draw, given.context) for _ in range(given.requests)]
    found: dict[str, Any] = {"side": side, "settings": settings_of(side, given)}
    options: dict[str, Any] | None = None
    if side != "plain":
        options = {"mode": "hierarchical", "budget": given.budget}
    if side == "hosted":
        options = {**(options or {}), "hosted": True, "lag": given.lag, "columns": given.columns}
    if side == "naive":
        options = {**(options or {}), "hosted": True, "lag": 1, "columns": 2, "reuse": 1}
        os.environ[COPIES_VARIABLE] = "in-step"

    async def work(engine: Any) -> None:
        sampling = Sampling(max_new_tokens=given.answer, ignore_eos=True)
        short = [GenerateRequest("warm", ids[:64], "warm", "prefix", sampling) for ids in contexts[:2]]
        await asyncio.gather(*(first_token(engine, request) for request in short))
        requests = [
            GenerateRequest("hosted", ids, "bench", "prefix", sampling, decode=options) for ids in contexts
        ]
        started = time.perf_counter()
        seen: list[dict[str, Any]] = []
        watching = asyncio.create_task(watch(engine, seen)) if side in HOSTED else None
        answers = await asyncio.gather(*(first_token(engine, request) for request in requests))
        ended = time.perf_counter()
        if watching is not None:
            watching.cancel()
            found["hosting, by second"] = seen
        held, since, until = overlap([(each.chunks[0][0], each.chunks[-1][0]) for each in answers])
        made = sum(tokens_between(each, since, until) for each in answers)
        decode = [each.last.decode for each in answers if each.last.decode is not None]
        found["held"] = held
        found["tokens a second"] = round(made / (until - since), 1) if until > since else None
        found["step ms"] = round(1e3 * held * (until - since) / made, 3) if made else None
        found["tokens a second in all"] = round(given.requests * given.answer / (ended - started), 1)
        found["seconds"] = round(ended - started, 2)
        found["first token s"] = sorted(round(each.chunks[0][0] - started, 2) for each in answers)
        if decode:
            found["hosted share of steps"] = sum(d.hosted_steps for d in decode) / sum(
                d.steps for d in decode
            )
            found["hits"], found["misses"] = sum(d.hits for d in decode), sum(d.misses for d in decode)
            found["working sets, pages"] = sorted(round(d.working_set, 1) for d in decode)
            found["columns, pages"] = sorted(d.columns for d in decode)
            found["loaded GB"] = round(sum(d.loaded_bytes for d in decode) / 1e9, 3)
            await engine.control("check")
            found["columns and statistics checked"] = True
        found["environment"] = report.environment()
        found["engine"] = {"device": engine.info.device, "attention": engine.info.attention_backend}

    model_shapes.run_engine(given.shape, work, **found["settings"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sides", nargs="*", default=[], help=f"of {', '.join(SIDES)}; default all")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--kv-gb", type=float, default=24.0)
    parser.add_argument("--host-gb", type=float, default=90.0)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--columns", type=int, default=0, help="per page of a choice; 0: as they take")
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--embedded", action="store_true")
    given = parser.parse_args()
    given.shape = "embedded" if given.embedded else "llama-3.1-8b"
    if given.embedded:
        token = model_shapes.kv_bytes_per_token(given.shape)
        given.context, given.answer, given.requests, given.budget, given.page = 1200, 48, 6, 128, 16
        given.kv_gb, given.host_gb = 4000 * token / 1e9, 9000 * token / 1e9
    sides = given.sides or list(SIDES)
    if unknown := set(sides) - set(SIDES):
        parser.error(f"no side {', '.join(sorted(unknown))}: one of {', '.join(SIDES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    if len(sides) == 1:
        found = measure(sides[0], given)
        print(found, flush=True)
        write_json(given.out / f"hosted-{sides[0]}.json", found)
        return
    options = [each for each in sys.argv[2:] if each not in SIDES]
    for side in sides:  # a process has one engine
        subprocess.run([sys.executable, __file__, str(given.out), side, *options], check=True)
    found = [json.loads((given.out / f"hosted-{side}.json").read_text()) for side in sides]
    workload = {
        "model": f"{given.shape}, random weights",
        "attention": found[0]["engine"]["attention"],
        "requests, all at once": given.requests,
        "context tokens": given.context,
        "answer tokens": given.answer,
        "KV and statistics on the device, GB": given.kv_gb,
        "pinned host memory, GB": given.host_gb,
        "budget": given.budget,
        "lag": given.lag,
        "columns": given.columns or "as they take",
    }
    ran_on = found[0]["environment"]
    rows = [row_of(each) for each in found]
    report.write("hosted", workload, rows, out=given.out / "h200-hosted.json", note=NOTE, ran_on=ran_on)


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return a side's figures as a row of the report."""
    waits = found["first token s"]
    hosted = found["side"] in HOSTED
    share = found.get("hosted share of steps")
    return {
        "side": found["side"],
        "held at once": found["held"],
        "tokens/s": found["tokens a second"],
        "step ms": found["step ms"],
        "tokens/s in all": found["tokens a second in all"],
        "seconds in all": found["seconds"],
        "first token s, p50": statistics.median(waits),
        "last": waits[-1],
        "hosted share of steps": round(share, 3) if hosted and share is not None else None,
        **{name: found.get(name) if hosted else None for name in ("hits", "misses", "loaded GB")},
        "KV slots": found["settings"]["max_total_tokens"],
    }


if __name__ == "__main__":
    main()
