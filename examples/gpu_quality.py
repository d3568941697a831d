"""Exact match of every strategy on question sets, inside the engine of a CUDA machine: bfloat16, CUDA graphs, overlap scheduler.

    python examples/gpu_quality.py OUT.json SET.jsonl.gz [SET.jsonl.gz ...]

Needs SGLang 0.5.16 and this project on the path, and no web server: `ragserve eval` is the way where the whole product is installed. The
attention backend is SGLang's default unless RAGSERVE_ATTENTION names another.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine import local
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.eval.metrics import exact_match
from ragserve.prompt import PromptBuilder, PromptDocument
from sglang_ext.protocol import Span

CASES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("full", {}, 500),
    ("prefix", {}, 500),
    ("concat", {}, 300),
    ("concat", {"recompute": "all"}, 200),
    ("epic", {"first": 16}, 300),
    ("cacheblend", {"share": 0.15}, 300),
)
IN_FLIGHT = 16


async def answer(engine: Any, builder: PromptBuilder, row: dict[str, Any], strategy: str, options: dict[str, Any]) -> bool:
    documents = [PromptDocument(str(i), title, text) for i, (title, text) in enumerate(row["docs"])]
    prompt = builder.build(row["question"], documents, max_prompt_tokens=8000)
    spans = tuple(Span(s.start, s.end) for s in prompt.segments if s.kind != "question")
    text = ""
    async for chunk in engine.generate(GenerateRequest("q", prompt.input_ids, "n", strategy, Sampling(24), spans, options)):
        text += chunk.text
    return bool(exact_match(text, row["answers"]))


async def measure(engine: Any, sets: list[Path]) -> list[dict[str, Any]]:
    builder = PromptBuilder.load(engine.info.tokenizer)
    found = []
    for path in sets:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        for strategy, options, n in CASES:
            places = asyncio.Semaphore(IN_FLIGHT)

            async def one(row: dict[str, Any], strategy: str = strategy, options: dict[str, Any] = options) -> bool:
                async with places:  # noqa: B023 - awaited within this turn of the loop
                    return await answer(engine, builder, row, strategy, options)

            started = time.perf_counter()
            right = await asyncio.gather(*(one(row) for row in rows[:n]))
            share = round(100 * sum(right) / len(right), 1)
            seconds = round(time.perf_counter() - started, 1)
            found.append({"set": path.name, "strategy": strategy, "options": options, "n": len(right), "EM": share, "seconds": seconds})
            print(json.dumps(found[-1]), flush=True)
    return found


def main(out: Path, sets: list[Path]) -> None:
    report: dict[str, Any] = {"questions in flight": IN_FLIGHT}

    def make_app(engine: local.LocalEngine, sglang_app: Any) -> Any:
        from fastapi import FastAPI

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with sglang_app.router.lifespan_context(sglang_app):
                report["engine"] = str(await engine.start())
                try:
                    report["rows"] = await measure(engine, sets)
                    await engine.control("check")
                finally:
                    engine.stop()
                yield
                await engine.close()

        return FastAPI(lifespan=lifespan)

    attention = os.environ.get("RAGSERVE_ATTENTION")
    engine_args = {"attention_backend": attention, "sampling_backend": "pytorch"} if attention else {}
    local.serve(load(model=DEFAULT_MODEL, data_dir=out.parent / "gpu-quality-data", engine_args=engine_args), make_app)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
