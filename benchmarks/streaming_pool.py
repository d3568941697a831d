"""How many requests run at once, and what each holds, where streaming heads have a pool of their own.

    python -m benchmarks.streaming_pool OUT.json [--shape embedded | llama-3.1-8b] [--lengths 4096,8064]
        [--kv-tokens N] [--requests N] [--answer N] [--pattern FILE] [--attention NAME]
        [--kinds shared,own]

Each kind is an engine in a process of its own with the same bytes for KV: those of ``--kv-tokens`` tokens
with all heads. shared: SGLang with one pool, without sparse attention. own: half of the heads stream
(``--pattern``, else every second one) and have a pool of their own. At each length a prompt alone shows the
pages that it holds while it decodes; then so many prompts come at once that no engine takes all of them.
A few minutes on a CPU; two engine starts on a GPU."""

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

from benchmarks.lib.fan_out import engine_args, this_script
from benchmarks.lib.held_at_once import overlap, tokens_between
from benchmarks.lib.places import RESULTS
from ragserve.bench import model_shapes
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.verification import report
from ragserve.verification.engine_run import TimedAnswer, first_token, random_tokens
from sglang_ext.attention.pools.streaming_heads import save_pattern

PAGE, SINK, LOCAL = 64, 64, 256
RING = 6  # pages of a request's streaming heads
PATTERN = RESULTS / "streaming-memory-heads.json"
NOTE = (
    "tokens fit: slots of the pool of the other heads, or of the one pool. at once: requests that decode at "
    "the same time, of as many as came. pages: that a request alone holds while it decodes, where a page of "
    "some heads counts as their share; rings as a whole. tokens/s: of all answers while as many decode as "
    "ever do. first s: the first token of a prompt alone."
)


def pattern_of(name: str, folder: Path) -> Path:
    """Return a pattern file in which half of a shape's heads stream, of random weights every other one."""
    if name == "embedded":
        return PATTERN
    shape = model_shapes.SHAPES[name]
    layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    number = torch.arange(layers * heads)
    gates = ((number % 2).float() + number / number.numel() / 2).view(layers, heads)
    save_pattern(folder / "heads.json", gates, share=0.5, model=name)
    return folder / "heads.json"


def settings_of(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings of an engine of a kind with the bytes of ``--kv-tokens``."""
    own = engine_args(given.attention) | {"max_running_requests": given.requests}
    if given.shape == "llama-3.1-8b":  # a shorter start
        own |= {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": given.requests}
    common = {"kv_disk_bytes": 0, "kv_host_bytes": 2**24}
    if given.kind == "shared":
        return common | {"max_total_tokens": given.kv_tokens, "engine_args": own | {"page_size": PAGE}}
    path = given.pattern or pattern_of(given.shape, folder)
    streaming = torch.tensor(json.loads(path.read_text(encoding="utf-8"))["streaming"]).float()
    share = float(streaming.mean())
    # the rings of SGLang's row for padding, too
    tokens = (given.kv_tokens - (given.requests + 1) * RING * PAGE * share) / (1 - share)
    return common | {
        "max_total_tokens": int(tokens) // PAGE * PAGE,
        "sparse_attention": "on",
        "decode_mode": "dense",
        "decode_heads": path,
        "decode_heads_pool": "own",
        "decode_page_size": PAGE,
        "engine_args": own,
    }


def request_of(name: str, ids: list[int], answer: int) -> GenerateRequest:
    return GenerateRequest(name, ids, "pool", "full", Sampling(answer, ignore_eos=True))


async def held_pages(engine: Any) -> float:
    """Return the pages that running requests hold now."""
    info = await engine.control("info")
    if info["streaming_pool"] is not None:
        return float(info["streaming_pool"]["held_pages"])
    return float((await engine.control("slots"))["now"]) / PAGE


async def alone(engine: Any, ids: list[int], answer: int) -> tuple[float, float]:
    """Return the most pages that a prompt holds while it decodes, and the seconds to its first token."""
    begun = asyncio.Event()
    running = asyncio.create_task(
        first_token(engine, request_of("alone", ids, answer), on_first=lambda _: begun.set())
    )
    await begun.wait()
    most = 0.0
    while not running.done():
        most = max(most, await held_pages(engine))
        await asyncio.sleep(0.01)
    return most, (await running).ttft_ms / 1e3


async def measure(engine: Any, tokens: int, given: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(tokens)
    pages, first = await alone(engine, random_tokens(draw, tokens), given.answer)
    prompts = [random_tokens(draw, tokens) for _ in range(given.requests)]
    answers: list[TimedAnswer] = await asyncio.gather(
        *(first_token(engine, request_of(f"r{i}", ids, given.answer)) for i, ids in enumerate(prompts))
    )
    most, spans = overlap([(answer.chunks[0][0], answer.chunks[-1][0]) for answer in answers])
    decoded = sum(tokens_between(answer, *span) for answer in answers for span in spans)
    left = await held_pages(engine)
    if left:
        raise SystemExit(f"{left} pages are held and nothing runs")
    row = {
        "kind": given.kind,
        "prompt": tokens,
        "tokens fit": engine.info.max_total_tokens,
        "at once": most,
        "came": given.requests,
        "pages": round(pages, 1),
        "tokens/s": round(decoded / max(1e-9, sum(end - begin for begin, end in spans)), 1),
        "first s": round(first, 3),
    }
    print(json.dumps(row), flush=True)
    return row


def one_kind(given: argparse.Namespace) -> None:
    """Write the rows of an engine to OUT."""

    async def work(engine: Any) -> list[dict[str, Any]]:
        return [await measure(engine, int(tokens), given) for tokens in given.lengths.split(",")]

    with tempfile.TemporaryDirectory(prefix="ragserve-pool-") as folder:
        rows = model_shapes.run_engine(given.shape, work, **settings_of(given, Path(folder)))
    given.out.write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="embedded")
    parser.add_argument("--lengths", default="4096,8064")
    parser.add_argument("--kv-tokens", type=int, default=32_768)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--pattern", type=Path)
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--kinds", default="shared,own")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kind is not None:
        one_kind(given)
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="ragserve-pool-") as folder:
        for kind in given.kinds.split(","):
            part = Path(folder) / f"{kind}.json"
            command = [*this_script(), str(part), *sys.argv[2:], "--kind", kind]
            subprocess.run(command, check=True)
            rows += json.loads(part.read_text(encoding="utf-8"))
    workload = {
        "model": "ragserve-tiny" if given.shape == "embedded" else f"{given.shape}, random weights",
        "KV tokens with all heads": given.kv_tokens,
        "answer": given.answer,
    }
    report.write("streaming-pool", workload, rows, out=given.out, note=NOTE)


if __name__ == "__main__":
    main()
