"""Answers of the small model after sparse prefill: exact match, the share of blocks computed and the
attention mass that they hold, by mode and alpha, beside dense prefill of the same prompts in the same engine.

    python -m benchmarks.sparse_prefill_quality OUT.json SET.jsonl.gz [SET ...] [--rows N]
        [--alphas A,A] [--shares S,S] [--dense-last N,N] [--model PATH] [--mass | --answers]
        [--side-by-side [--seconds S]] [--in-flight N] [--longest TOKENS]

Sets as for gpu_decode_quality.py; prompts over ``--longest`` tokens, 8,000, are left out. Decoding is dense.
On a CPU a prompt of 8,000 takes 1 to 20 seconds in each mode. Mass is measured in transformers
(prefill_mass.py). --mass: without answers, and without an engine; blocks are those of a dense prefill's
queries and keys then. --answers: without mass. --shares: also a fixed share of the blocks.
--side-by-side: an engine for each set, all at once on one GPU; OUT-SET.json is written as they go, and OUT
when they have ended or time is up. Rows of other sets, modes, alphas and shares in OUT stay."""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_decode_quality import LONGEST, Asked, prompts
from benchmarks.lib.fan_out import engine_args, listed, this_script
from benchmarks.lib.prefill_mass import PrefillMass
from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.offline import run_once
from ragserve.verification import report
from ragserve.verification.engine_run import first_token
from ragserve.verification.metrics import contains_answer, exact_match
from sglang_ext.wire.prefill_options import DENSE_LAST, PrefillOptions

KEY = ("set", "mode", "alpha", "asked share", "dense last")
NOTE = (
    "right: exact match, percent (LongEval: the answer contains the number). kept: of the prompts that dense "
    "prefill answers rightly (of), those that are still right, percent, with the 95 % Wilson interval. "
    "blocks: share of the blocks of dense attention that were computed, mean over prompts, layers and query "
    "heads; in rows without answers those that the queries and keys of a dense prefill choose. mass: "
    "attention of 128 random queries of each prompt to such blocks, mean, and of the layer and head with the "
    "least. seconds: of a prompt, all modes together. Blocks are 128 queries by 64 keys: a prompt of few "
    "blocks cannot leave out much."
)


async def ask(
    engine: Any, prefill: dict[str, Any], asked: list[Asked], in_flight: int
) -> list[tuple[bool, float]]:
    """Ask all prompts of a set in one mode: whether each answer is right, and the blocks computed."""
    places = asyncio.Semaphore(in_flight)

    async def one(prompt: Asked) -> tuple[bool, float]:
        ids, answers, exact = prompt
        async with places:
            request = GenerateRequest(
                "q", ids, "quality", "full", Sampling(40), prefill=prefill, decode={"mode": "dense"}
            )
            said = await first_token(engine, request)
        right = exact_match(said.text, answers) > 0 if exact else contains_answer(said.text, answers)
        return bool(right), 1.0 if said.last.prefill is None else said.last.prefill.share

    return list(await asyncio.gather(*(one(prompt) for prompt in asked)))


def kept(dense: list[tuple[bool, float]], sparse: list[tuple[bool, float]]) -> dict[str, Any]:
    """Return how many of the answers that dense prefill gets right stay right, with the Wilson interval."""
    still = [right for (was, _), (right, _) in zip(dense, sparse, strict=True) if was]
    if not still:
        return {}
    n, share, z = len(still), sum(still) / len(still), 1.96
    middle, spread = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    low, high = ((middle + sign * spread) / (1 + z**2 / n) for sign in (-1, 1))
    return {
        "kept": round(100 * share, 1),
        "of": n,
        "interval": [round(100 * max(0.0, low), 1), round(100 * min(1.0, high), 1)],
    }


def held(mass: PrefillMass, asked: list[Asked]) -> list[dict[str, Any]]:
    """Return the attention mass that each mode's blocks hold, and the blocks; with the seconds that a prompt
    took in all modes together."""
    start = time.monotonic()
    found = torch.stack([mass.of(ids, seed) for seed, (ids, _, _) in enumerate(asked)]).mean(0)
    seconds = (time.monotonic() - start) / len(asked)
    return [
        {
            "blocks": round(float(blocks.mean()), 3),
            "mass": round(float(held.mean()), 4),
            "least mass": round(float(held.min()), 4),
            "seconds": round(seconds, 1),
        }
        for held, blocks in zip(*found, strict=True)
    ]


async def measure(engine: Any, given: argparse.Namespace) -> None:
    """Measure all sets; without an engine only what the blocks hold."""
    builder = PromptBuilder.load(str(given.model))
    growing = _report(given.out)
    growing.workload = {"model": Path(given.model).name}
    for path in given.sets:
        asked = await asyncio.to_thread(prompts, path, given.rows, builder, given.longest)
        if not asked:
            print(f"{path.name}: every prompt is too long", flush=True)
            continue
        row = {"set": path.name.split(".")[0], "n": len(asked)}
        row["prompt tokens"] = sum(len(ids) for ids, _, _ in asked) // len(asked)
        kinds = [
            {"mode": m, "dense_last": n} for n in given.dense_last for m in ("vertical_slash", "block_sparse")
        ]
        modes: list[dict[str, Any]] = [kind | {"alpha": a} for a in given.alphas for kind in kinds]
        modes += [kind | {"share": s} for s in given.shares for kind in kinds]
        dense: list[tuple[bool, float]] = []
        mass: list[dict[str, Any]] = [{} for _ in modes]
        if engine is not None:
            dense = await ask(engine, {"mode": "dense"}, asked, given.in_flight)
            growing.add({**row, "mode": "dense", "alpha": None, "dense last": None, **_means(dense)})
        if not given.answers:
            measured = PrefillMass(given.model, [PrefillOptions(**mode) for mode in modes])
            growing.workload |= {"queries of a prompt": measured.queries, "layers": measured.layers}
            growing.workload |= {"query heads": measured.heads}
            mass = await asyncio.to_thread(held, measured, asked)
        for mode, more in zip(modes, mass, strict=True):
            found = more
            if engine is not None:
                done = await ask(engine, {"dense_below": 0} | mode, asked, given.in_flight)
                found = more | _means(done) | kept(dense, done)
            named = {"alpha": mode.get("alpha"), "asked share": mode.get("share")}
            growing.add({**row, "mode": mode["mode"], "dense last": mode["dense_last"], **named, **found})
    growing.show()


def _report(out: Path) -> report.GrowingReport:
    earlier = report.read_report(out)[1]
    return report.GrowingReport("sparse prefill", out, note=NOTE, key=KEY, earlier=earlier)


def side_by_side(given: argparse.Namespace) -> int:
    """Measure each set in a process of its own, all at once, and join their reports. Returns how many failed
    or were late."""
    deadline = time.monotonic() + given.seconds
    names = {str(path) for path in given.sets} | {str(given.out), "--side-by-side"}
    rest = [argument for argument in sys.argv[1:] if argument not in names]
    outs = {
        path: given.out.with_name(f"{given.out.stem}-{path.name.split('.')[0]}.json") for path in given.sets
    }
    running = []
    for path, out in outs.items():
        running.append(subprocess.Popen([*this_script(), str(out), str(path), *rest]))
        time.sleep(2)  # engines that start at once may pick the same port
    while time.monotonic() < deadline and any(each.poll() is None for each in running):
        time.sleep(0.5)
    failed = sum(each.poll() != 0 for each in running)
    for each in running:
        if each.poll() is None:
            each.terminate()  # its rows are on disk
            each.wait()
    growing = _report(given.out)
    for out in outs.values():
        workload, rows = report.read_report(out)
        growing.workload |= workload
        growing.rows += rows
    growing.show()
    return failed


def _means(done: list[tuple[bool, float]]) -> dict[str, Any]:
    return {
        "right": round(100 * sum(right for right, _ in done) / len(done), 1),
        "blocks": round(sum(share for _, share in done) / len(done), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--alphas", type=listed(float), default=[0.9, 0.955], help='"": none')
    parser.add_argument("--shares", type=listed(float), default=list[float]())
    parser.add_argument(
        "--dense-last",
        type=listed(int),
        default=[0, DENSE_LAST],
        help="last tokens of the prompt that attend to everything",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--mass", action="store_true")
    parser.add_argument("--answers", action="store_true")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest prompt asked")
    given = parser.parse_args()
    if given.side_by_side:
        return side_by_side(given)
    if given.mass:
        asyncio.run(measure(None, given))
        return 0
    graphs: dict[str, Any] = {}
    if torch.cuda.is_available():  # small ones: starting matters more here than decoding
        graphs = {"cuda_graph_max_bs_decode": given.in_flight, "disable_prefill_cuda_graph": True}
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            model=given.model,
            data_dir=Path(folder),
            kv_disk_bytes=0,
            sparse_attention="on",
            decode_mode="dense",
            max_total_tokens=2 * given.in_flight * given.longest,
            engine_timeout_s=3600,
            engine_args=engine_args(None) | graphs,
        )
        run_once(settings, lambda engine: measure(engine, given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
