"""Answers of the small model after sparse prefill: exact match, and the share of blocks computed, by mode and
alpha, beside dense prefill of the same prompts in the same engine.

    python examples/sparse_prefill_quality.py OUT.json SET.jsonl.gz [SET ...] [--rows N] [--alphas A,A]
        [--model PATH]

Sets as for gpu_decode_quality.py; prompts over 8,000 tokens are left out. Decoding is dense. On a CPU a row
takes seconds, in each mode."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_decode_quality import Asked, prompts

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.offline import run_once
from ragserve.measuring import report
from ragserve.measuring.engine_run import first_token
from ragserve.measuring.metrics import contains_answer, exact_match

IN_FLIGHT = 4
NOTE = (
    "right: exact match, percent. blocks: share of the blocks of dense attention that were computed, mean "
    "over prompts, layers and query heads. Blocks are 128 queries by 64 keys: a prompt of few blocks cannot "
    "leave out much."
)


async def ask(engine: Any, prefill: dict[str, Any], asked: list[Asked]) -> dict[str, Any]:
    """Ask all prompts of a set in one mode."""
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

    done = await asyncio.gather(*(one(prompt) for prompt in asked))
    return {
        "n": len(done),
        "prompt tokens": sum(len(ids) for ids, _, _ in asked) // len(asked),
        "right": round(100 * sum(right for right, _ in done) / len(done), 1),
        "blocks": round(sum(share for _, share in done) / len(done), 3),
    }


async def measure(engine: Any, given: argparse.Namespace) -> None:
    builder = PromptBuilder.load(engine.info.tokenizer)
    growing = report.GrowingReport("sparse prefill", given.out, note=NOTE, key=("set", "mode", "alpha"))
    growing.workload = {"model": Path(given.model).name, "rows": given.rows}
    for path in given.sets:
        asked = await asyncio.to_thread(prompts, path, given.rows, builder)
        if not asked:
            print(f"{path.name}: every prompt is too long", flush=True)
            continue
        modes: list[dict[str, Any]] = [{"mode": "dense"}]
        modes += [{"mode": mode, "alpha": a} for mode in ("lines", "blocks") for a in given.alphas]
        for mode in modes:
            found = await ask(engine, {"dense_below": 0} | mode, asked)
            growing.add({"set": path.name.split(".")[0], "alpha": None, **mode, **found})
    growing.show()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument(
        "--alphas", type=lambda text: [float(a) for a in text.split(",")], default=[0.9, 0.955]
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            model=given.model,
            data_dir=Path(folder),
            kv_disk_bytes=0,
            sparse_attention="on",
            decode_mode="dense",
            engine_timeout_s=3600,
        )
        run_once(settings, lambda engine: measure(engine, given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
