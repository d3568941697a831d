"""Answers of the small model after sparse prefill: exact match, the share of blocks computed and the
attention mass that they hold, by mode and alpha, beside dense prefill of the same prompts in the same engine.

    python examples/sparse_prefill_quality.py OUT.json SET.jsonl.gz [SET ...] [--rows N] [--alphas A,A]
        [--model PATH] [--mass]

Sets as for gpu_decode_quality.py; prompts over 8,000 tokens are left out. Decoding is dense. On a CPU a
prompt takes 1 to 20 seconds in each mode. Mass is measured in transformers (prefill_mass.py). --mass: without
answers, and without an engine; blocks are those of a dense prefill's queries and keys then. Rows of other
sets, modes and alphas in OUT stay."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_decode_quality import LONGEST, Asked, prompts
from prefill_mass import PrefillMass

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.offline import run_once
from ragserve.measuring import report
from ragserve.measuring.engine_run import first_token
from ragserve.measuring.metrics import contains_answer, exact_match
from sglang_ext.prefill_options import PrefillOptions

IN_FLIGHT = 2
NOTE = (
    "right: exact match, percent (LongEval: the answer contains the number). kept: of the prompts that dense "
    "prefill answers rightly (of), those that are still right, percent, with the 95 % Wilson interval. "
    "blocks: share of the blocks of dense attention that were computed, mean over prompts, layers and query "
    "heads; in rows without answers those that the queries and keys of a dense prefill choose. mass: "
    "attention of 128 random queries of each prompt to such blocks, mean, and of the layer and head with the "
    "least. Blocks are 128 queries by 64 keys: a prompt of few blocks cannot leave out much."
)


async def ask(engine: Any, prefill: dict[str, Any], asked: list[Asked]) -> list[tuple[bool, float]]:
    """Ask all prompts of a set in one mode: whether each answer is right, and the blocks computed."""
    places = asyncio.Semaphore(IN_FLIGHT)

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


def held(given: argparse.Namespace, modes: list[dict[str, Any]], asked: list[Asked]) -> list[dict[str, Any]]:
    """Return the attention mass that each mode's blocks hold, and the blocks."""
    mass = PrefillMass(given.model, [PrefillOptions(**mode) for mode in modes])
    found = torch.stack([mass.of(ids, seed) for seed, (ids, _, _) in enumerate(asked)]).mean(0)
    return [
        {
            "blocks": round(float(blocks.mean()), 3),
            "mass": round(float(held.mean()), 4),
            "least mass": round(float(held.min()), 4),
        }
        for held, blocks in zip(*found, strict=True)
    ]


async def measure(engine: Any, given: argparse.Namespace) -> None:
    """Measure all sets; without an engine only what the blocks hold."""
    builder = PromptBuilder.load(str(given.model))
    growing = report.GrowingReport(
        "sparse prefill",
        given.out,
        note=NOTE,
        key=("set", "mode", "alpha"),
        earlier=report.read_report(given.out)[1],
    )
    growing.workload = {"model": Path(given.model).name}
    for path in given.sets:
        asked = await asyncio.to_thread(prompts, path, given.rows, builder)
        if not asked:
            print(f"{path.name}: every prompt is too long", flush=True)
            continue
        row = {"set": path.name.split(".")[0], "n": len(asked)}
        row["prompt tokens"] = sum(len(ids) for ids, _, _ in asked) // len(asked)
        modes = [{"mode": mode, "alpha": a} for mode in ("lines", "blocks") for a in given.alphas]
        dense: list[tuple[bool, float]] = []
        if engine is not None:
            dense = await ask(engine, {"mode": "dense"}, asked)
            growing.add({**row, "mode": "dense", "alpha": None, **_means(dense)})
        mass = await asyncio.to_thread(held, given, modes, asked)
        for mode, more in zip(modes, mass, strict=True):
            found = more
            if engine is not None:
                done = await ask(engine, {"dense_below": 0} | mode, asked)
                found = more | _means(done) | kept(dense, done)
            growing.add({**row, **mode, **found})
    growing.show()


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
    parser.add_argument(
        "--alphas", type=lambda text: [float(a) for a in text.split(",")], default=[0.9, 0.955]
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--mass", action="store_true")
    given = parser.parse_args()
    if given.mass:
        asyncio.run(measure(None, given))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            model=given.model,
            data_dir=Path(folder),
            kv_disk_bytes=0,
            sparse_attention="on",
            decode_mode="dense",
            max_total_tokens=4 * LONGEST,
            engine_timeout_s=3600,
        )
        run_once(settings, lambda engine: measure(engine, given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
