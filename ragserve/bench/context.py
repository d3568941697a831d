"""Time to the first token of composed contexts beside full and prefix prefill, and what it depends on: length, tier, tokens kept.

Runs the engine in this process group, without retrieval: documents are random tokens of fixed length, so that lengths are exact. All
strategies answer in the same engine and run; quality is `ragserve eval`'s business.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.bench import report
from ragserve.config import load
from ragserve.engine.base import GenerateRequest, Sampling
from sglang_ext.protocol import Span

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUESTION_TOKENS = 32
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A strategy with options, and the tier that its documents are on."""

    name: str
    strategy: str
    options: dict[str, Any]
    tier: str | None = None


CASES = (
    Case("full", "full", {}),
    Case("prefix, question new", "prefix", {}),
    Case("concat, all kept", "concat", {}, "device"),
    Case("concat, 15 % kept", "concat", {"keep": 0.15}, "device"),
    Case("epic 16", "epic", {"first": 16}, "device"),
    Case("cacheblend 15 %", "cacheblend", {"share": 0.15}, "device"),
    Case("concat, all kept", "concat", {}, "host"),
    Case("concat, 15 % kept", "concat", {"keep": 0.15}, "host"),
)


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    lengths: Sequence[int] = (2048, 4096, 7680),
    document_tokens: int = 512,
    shape: str = "embedded",
    engine_args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A row per length and case. ``shape``: `embedded` (the small model) or `llama-3.1-8b` (its shape, random weights)."""
    from ragserve.engine import local

    found: dict[str, Any] = {}
    lengths = lengths[:1] if quick else lengths
    with tempfile.TemporaryDirectory(prefix="ragserve-context-") as folder:
        flags: dict[str, Any] = {
            "data_dir": Path(folder) / "data",
            "kv_disk_bytes": 0,
            "port": 30999,
            "engine_args": dict(engine_args or {}),
        }
        if shape != "embedded":
            flags["model"] = _dummy_model(Path(folder))
            flags["engine_args"] |= {"load_format": "dummy", "skip_tokenizer_init": False}
            flags["kv_host_bytes"] = (max(lengths) + 4096) * 2 * 32 * 8 * 128 * 2
        settings = load(**flags)

        def make_app(engine: local.LocalEngine, sglang_app: Any) -> Any:
            from fastapi import FastAPI

            @contextlib.asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[None]:
                async with sglang_app.router.lifespan_context(sglang_app):
                    found["info"] = await engine.start()
                    try:
                        found["rows"] = [row async for row in _measure(engine, lengths, document_tokens)]
                    finally:
                        engine.stop()
                    yield
                    await engine.close()

            return FastAPI(lifespan=lifespan)

        local.serve(settings, make_app)
    info = found["info"]
    workload = {
        "model": shape,
        "device": info.device,
        "attention": info.attention_backend,
        "document tokens": document_tokens,
        "question tokens": QUESTION_TOKENS,
        "repeats after one warm-up": REPEATS,
    }
    return report.write("context", workload, found["rows"], out=out_dir / f"context-{shape}.json" if out_dir else None)


async def _measure(engine: Any, lengths: Sequence[int], document_tokens: int) -> AsyncIterator[dict[str, Any]]:
    draw = random.Random(0)
    for length in lengths:
        context = [draw.randrange(10, 8000) for _ in range(length)]
        spans = tuple(Span(a, min(a + document_tokens, length)) for a in range(0, length, document_tokens))
        rival = 0.0
        for case in CASES:
            if case.strategy == "prefix":
                await _first_token(engine, case, context, spans, draw)
            if case.tier == "host":
                await _first_token(engine, case, context, spans, draw)
                await engine.control("evict", tiers=["device"])
            await _first_token(engine, case, context, spans, draw)
            runs = [await _first_token(engine, case, context, spans, draw) for _ in range(REPEATS)]
            ttft = statistics.median(seconds for seconds, _ in runs)
            rival = ttft if case.strategy == "full" else rival
            row: dict[str, Any] = {"context tokens": length, "strategy": case.name, "tier": case.tier, "ttft ms": round(ttft * 1e3, 2)}
            row["times sooner than full"] = round(rival / ttft, 1)
            done = runs[-1][1]
            if done is not None:
                row |= {"kept": done.kept, "recomputed": done.recomputed, "tiers": json.dumps(dict(done.by_tier))}
                row |= {"compose ms": round(done.compose_ms, 2), "recompute ms": round(done.recompute_ms, 2)}
            yield row


async def _first_token(engine: Any, case: Case, context: list[int], spans: tuple[Span, ...], draw: random.Random) -> tuple[float, Any]:
    """Seconds to the first token of one request with a question of its own, and what was composed for it."""
    question = [draw.randrange(10, 8000) for _ in range(QUESTION_TOKENS)]
    request = GenerateRequest("bench", context + question, "bench", case.strategy, Sampling(max_new_tokens=2), spans, case.options)
    started = time.perf_counter()
    first, done = 0.0, None
    async for chunk in engine.generate(request):
        first = first or time.perf_counter() - started
        done = chunk.context
    return first, done


def _dummy_model(folder: Path) -> str:
    """A folder with the 8B shape's configuration and the small model's tokenizer; SGLang makes up the weights."""
    import shutil

    from ragserve.config import DEFAULT_MODEL

    model = folder / "llama-3.1-8b-shape"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEFAULT_MODEL) / name, model)
    return str(model)
