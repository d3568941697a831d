"""Answers of the embedded model where streaming heads have a pool of their own, beside dense ones.

    python examples/streaming_answers.py OUT.json SET.jsonl.gz [SET ...] [--rows N] [--longest N]
        [--heads none,gates,even] [--pattern FILE] [--attention NAME]
    python examples/streaming_answers.py PATTERN.json --choose [--tokens N]

Sets as for gpu_decode_quality.py. Each kind is an engine in a process of its own: none is SGLang with one
pool; gates streams the pattern file's heads, in prefill and in decoding; even streams in each layer the half
of the heads with the lowest gates. --choose makes a pattern file quickly, by what each head costs when it
alone streams."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fan_out import engine_args
from gpu_decode_quality import prompts

from ragserve.answering.prompt import PromptBuilder
from ragserve.bench import model_shapes
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.compat import prepare
from ragserve.verification import report
from ragserve.verification.engine_run import first_token
from ragserve.verification.metrics import exact_match
from sglang_ext.attention.pools.streaming_heads import even_streaming_heads, save_pattern

PATTERN = Path(__file__).parent / "results" / "streaming-memory-heads.json"
ANSWER, AT_ONCE = 40, 4
NOTE = (
    "right: exact match, percent. same: of the answers, those with dense attention's text, percent. gates: "
    "the pattern file's heads; even: in each layer the half of the heads with the lowest gates."
)


@torch.no_grad()
def choose(out: Path, tokens: int) -> None:
    """Write a pattern file by what each head costs when it alone streams, on one text of passkeys.

    `ragserve calibrate-heads` learns better ones, in a hundred times as long."""
    prepare()
    from sglang_ext.attention.pools.calibration import GatedModel, make_passkeys

    gated = GatedModel(DEFAULT_MODEL)
    text = make_passkeys(gated.encode, tokens, random.Random(0))
    want = gated.hidden(text)
    errors = torch.zeros(gated.shape)
    for layer in range(gated.shape[0]):
        for head in range(gated.shape[1]):
            gates = torch.ones(gated.shape)
            gates[layer, head] = 0
            with gated.gated(gates):
                errors[layer, head] = (gated.hidden(text) - want).square().mean() / want.square().mean()
        print(f"layer {layer}: {errors[layer].tolist()}", flush=True)
    how = "examples/streaming_answers.py --choose: gates are errors with one head streaming, over the largest"
    name = Path(DEFAULT_MODEL).name
    save_pattern(out, errors / errors.max(), share=0.5, model=name, tokens=len(text.ids), **{"made by": how})


def settings_of(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    common = {"kv_disk_bytes": 0, "kv_host_bytes": 2**24, "engine_args": engine_args(given.attention)}
    if given.kind == "none":
        return common
    read = json.loads(given.pattern.read_text(encoding="utf-8"))
    pattern = folder / "heads.json"
    if given.kind == "even":
        read["streaming"] = even_streaming_heads(torch.tensor(read["gates"])).int().tolist()
    pattern.write_text(json.dumps(read), encoding="utf-8")
    own = {"sparse_attention": "on", "decode_mode": "dense", "decode_heads_pool": "own"}
    return common | own | {"decode_heads": pattern}


async def answers(engine: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    builder, rows = PromptBuilder.load(DEFAULT_MODEL), []
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(name: str, ids: list[int]) -> str:
        async with places:
            return (
                await first_token(engine, GenerateRequest(name, ids, "pool", "full", Sampling(ANSWER)))
            ).text

    for path in given.sets:
        asked = [row for row in prompts(path, given.rows, builder) if len(row[0]) <= given.longest]
        texts = await asyncio.gather(*(ask(f"{path.stem}-{i}", ids) for i, (ids, _, _) in enumerate(asked)))
        right = sum(exact_match(text, wanted) for text, (_, wanted, _) in zip(texts, asked, strict=True))
        rows.append(
            {
                "set": path.name.split(".")[0],
                "n": len(asked),
                "prompt tokens": sum(len(ids) for ids, _, _ in asked) // len(asked),
                "streaming heads": given.kind,
                "right": round(100 * right / len(asked), 1),
                "texts": texts,
            }
        )
        print(json.dumps(rows[-1])[:300], flush=True)
    return rows


def one_kind(given: argparse.Namespace) -> None:
    """Write the rows of an engine to OUT."""

    async def work(engine: Any) -> list[dict[str, Any]]:
        return await answers(engine, given)

    with tempfile.TemporaryDirectory(prefix="ragserve-answers-") as folder:
        rows = model_shapes.run_engine("embedded", work, **settings_of(given, Path(folder)))
    given.out.write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--longest", type=int, default=8000)
    parser.add_argument("--pattern", type=Path, default=PATTERN)
    parser.add_argument("--heads", default="none,gates,even")
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.choose:
        choose(given.out, given.tokens)
        return
    if given.kind is not None:
        one_kind(given)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ragserve-answers-") as folder:
        for kind in given.heads.split(","):
            part = Path(folder) / f"{kind}.json"
            command = [sys.executable, __file__, str(part), *sys.argv[2:], "--kind", kind]
            subprocess.run(command, check=True)
            rows += json.loads(part.read_text(encoding="utf-8"))
    dense = {row["set"]: row["texts"] for row in rows if row["streaming heads"] == "none"}
    for row in rows:
        if row["set"] in dense:
            pairs = zip(row["texts"], dense[row["set"]], strict=True)
            row["same"] = round(100 * sum(a == b for a, b in pairs) / row["n"], 1)
    shown = ["set", "n", "prompt tokens", "streaming heads", "right", "same"]
    workload = {"model": "ragserve-tiny", "pattern": given.pattern.name}
    report.write("streaming answers", workload, rows, out=given.out, note=NOTE, shown=shown)


if __name__ == "__main__":
    main()
