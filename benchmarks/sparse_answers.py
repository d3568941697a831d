"""Answers of a model with sparse decoding, sparse prefill and KV of few bits, beside dense attention and
rivals, over real sets and several engines on one machine.

    python -m benchmarks.sparse_answers OUT --model FOLDER --data FOLDER --sets lines@4000,kv@4000
        [--only 'ENGINE/SETTING;...'] [--budgets 512,1024,2048,4096,8192] [--thresholds 0.9,0.95]
        [--heads heads.json] [--limit N] [--half first] [--engines 4] [--shards 'ENGINE=2;...']
        [--in-flight 4] [--prompts N] [--pool TOKENS] [--set '{"dtype": ...}'] [--seconds 500] [--list]

`--list` prints the engines and settings, which `--only` chooses among by patterns with `*`. Sets are those of
`benchmarks.lib.long_sets`, and question sets (`benchmarks.long_contexts`). Each engine is a process of its
own, --engines of them at a time on one GPU; `--shards` divides an engine's questions between several. Each
answer is written to OUT/rows-*.jsonl at once, and the same command goes on where it stopped; after
``--seconds``, starts included, what runs is ended. `benchmarks.sparse_table` makes the tables.

`--heads`: a file of `ragserve calibrate --part heads`, made for this model, for the engines with streaming
heads, which are left out without one. Answers are greedy: of 24 tokens (F1; `lines` and `kv`: whether they
contain the answer), and of 300 for `qmsum` and `mtrag_un`. On two cores with the 0.5B, 40 prompts of 2,000
tokens take about ten minutes an engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.fan_out import engine_args, listed, this_script
from benchmarks.lib.long_sets import tasks_of
from benchmarks.lib.sparse_engines import SparseEngine, matching, sparse_engines, write_heads
from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings, load
from ragserve.engine import server_args
from ragserve.engine.offline import run_once
from ragserve.eval.presets import BENCHMARKS
from ragserve.eval.sparse_answers import SparseTask, ask_all
from ragserve.files import write_json
from ragserve.verification import rows
from ragserve.verification.report import environment

_POLL_S = 0.5
_ENDS_S = 20.0
_RESTARTS = 1  # engines that start at once may pick the same port


def engines_of(given: argparse.Namespace) -> list[SparseEngine]:
    """The engines that are wanted; without gates those that need none."""
    every = sparse_engines(given.budgets, given.thresholds)
    return [each for each in matching(every, given.only) if given.heads or each.streaming is None]


def interleaved(given: argparse.Namespace, builder: PromptBuilder) -> list[SparseTask]:
    """The shard's tasks of each set, mixed: any beginning of the list holds about the same share of every
    set."""
    shard, of = given.shard
    placed = []
    for name in given.sets:
        tasks = tasks_of(name, given.data, builder.count, given.limit, given.half)[shard::of]
        placed += [(number / len(tasks), name, task) for number, task in enumerate(tasks)]
    return [task for _, _, task in sorted(placed, key=lambda each: each[:2])]


def settings_of(given: argparse.Namespace, engine: SparseEngine, folder: Path) -> Settings:
    graphs: dict[str, Any] = {}
    if torch.cuda.is_available():  # small ones: starting matters more here than the last millisecond
        graphs = {"cuda_graph_max_bs_decode": given.in_flight, "disable_prefill_cuda_graph": True}
    own: dict[str, Any] = {
        "model": str(given.model),
        "data_dir": folder,
        "kv_disk_bytes": 0,
        "sparse_attention": "on",
        "decode_mode": "dense",
        "decode_budget": min(given.budgets),
        "decode_max_budget": max(given.budgets),
        "max_total_tokens": given.pool,
        "engine_timeout_s": 3600,
        "system_prompt": BENCHMARKS["short-answers"].system_prompt,
    }
    own |= engine.settings
    own["engine_args"] = graphs | engine_args(None) | own.get("engine_args", {})
    if engine.streaming is not None:
        gates = json.loads(given.heads.read_text(encoding="utf-8"))["gates"]
        own["decode_heads"] = folder / "heads.json"
        write_heads(own["decode_heads"], gates, engine)
    return load(**(own | given.set))


def work(given: argparse.Namespace) -> None:
    """Ask every ``of``-th question of an engine in this process."""
    engine = next(each for each in engines_of(given) if each.name == given.engine)
    finished = {key for key, row in rows.read(given.out).items() if not row.get("error")}
    named = file_name(engine.name)
    if engine.attention:
        plain = server_args._attention_config  # fields that no server needs
        server_args._attention_config = lambda settings: plain(settings) | dict(engine.attention)

    async def ask(running: Any) -> None:
        builder = PromptBuilder.load(running.info.tokenizer, settings.system_prompt)
        about = {"engine": asdict(running.info), "environment": environment()}
        write_json(given.out / f"engine-{named}.json", about)
        own = f"rows-{named}-{given.shard[0]}-{os.getpid()}.jsonl"  # two runs may write to one folder
        with rows.appending(given.out / own) as write:
            await ask_all(
                running,
                builder,
                await asyncio.wrap_future(tasks),
                engine.asked,
                in_flight=given.in_flight,
                prompts=given.prompts,
                finished=finished,
                write=write,
                named=lambda setting: f"{engine.name}/{setting.label}",
                until=given.until,
            )
        await running.control("check")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        settings = settings_of(given, engine, Path(folder))
        # Long contexts take a while to fill: while the engine starts.
        tasks = beside.submit(
            lambda: interleaved(given, PromptBuilder.load(str(given.model), settings.system_prompt))
        )
        run_once(settings, ask)


def file_name(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-")


def run(given: argparse.Namespace) -> list[str]:
    """Run the engines, `--engines` at a time, until they have ended or time is up; returns those that
    failed twice."""
    until = time.monotonic() + given.seconds  # of the system, so of the children, too
    shards = dict(part.rsplit("=", 1) for part in given.shards)
    waiting = [
        (engine.name, shard, int(shards.get(engine.name, 1)))
        for engine in engines_of(given)
        for shard in range(int(shards.get(engine.name, 1)))
    ]
    restarts = dict.fromkeys(waiting, _RESTARTS)
    running: dict[tuple[str, int, int], subprocess.Popen[bytes]] = {}
    failed = []
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < given.engines:
                job = waiting.pop(0)
                running[job] = _start(given, job, until)
            time.sleep(_POLL_S)
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                if process.returncode and restarts[job]:
                    restarts[job] -= 1
                    waiting.insert(0, job)
                elif process.returncode:
                    failed.append(job[0])
    finally:
        for process in running.values():
            process.terminate()  # its rows are on disk
        for process in running.values():
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
    return failed


def _start(given: argparse.Namespace, job: tuple[str, int, int], until: float) -> subprocess.Popen[bytes]:
    name, shard, of = job
    command = [*this_script(), *sys.argv[1:], "--engine", name, "--until", str(until)]
    with (given.out / f"worker-{file_name(name)}-{shard}.log").open("ab") as log:
        return subprocess.Popen([*command, "--shard", f"{shard},{of}"], stdout=log, stderr=log)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", type=listed(str), required=True)
    parser.add_argument("--only", type=lambda text: text.split(";"), default=["*"])
    parser.add_argument("--budgets", type=listed(int), default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--thresholds", type=listed(float), default=[0.9, 0.95, 0.98])
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--half", choices=("first", "second"))
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--shards", type=lambda text: text.split(";"), default=list[str]())
    parser.add_argument("--in-flight", type=int, default=4, help="requests of an engine at once")
    parser.add_argument("--prompts", type=int, help="prompts of an engine at once, at most --in-flight")
    parser.add_argument("--pool", type=int, default=65_536, help="tokens of each engine's KV pool")
    parser.add_argument("--set", type=json.loads, default={}, help="further settings of the engines, as JSON")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=listed(int), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        for engine in engines_of(given):
            print(*(f"{engine.name}/{each.label}" for each in engine.asked), sep="\n")
        return 0
    if given.engine:
        work(given)
        return 0
    rows.claim(given.out, {"model": given.model.name, **given.set})
    failed = run(given)
    print(f"{rows.count(given.out)} answers; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
