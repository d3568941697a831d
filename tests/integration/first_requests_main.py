"""Time the first request of every kind to an engine that is ready, and later ones, as JSON: milliseconds by
kind, in order. The prompts are none of the warm-up's.

    python -m tests.integration.first_requests_main DATA_FOLDER OUT.json [sparse]

sparse: with sparse decoding and hosted requests, and their kinds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.measuring.engine_run import first_token, in_tier, random_tokens
from sglang_ext.protocol import Span

TIMES = 6
SYSTEM, DOCUMENTS, QUESTION = 37, (523, 210, 96), 29  # tokens
STRATEGIES: dict[str, dict[str, Any]] = {
    "concat": {"keep": 0.4},
    "epic": {"first": 8},
    "cacheblend": {"share": 0.2},
    "samkv": {},
}
DECODE: dict[str, dict[str, Any]] = {
    "hierarchical": {"mode": "hierarchical", "budget": 256, "dense_below": 0},
    "progressive": {"mode": "progressive", "threshold": 0.8, "dense_below": 0},
    "hosted": {"mode": "hierarchical", "budget": 256, "dense_below": 0, "hosted": True},
}


class Kinds:
    """Asks requests over documents that are drawn once, each with a question of its own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._draw = random.Random(5)
        self._request = self._documents()

    def _documents(self) -> GenerateRequest:
        spans, at = [Span(0, SYSTEM)], SYSTEM
        for tokens in DOCUMENTS:
            spans.append(Span(at, at + tokens))
            at += tokens
        ids = random_tokens(self._draw, at)
        return GenerateRequest("first", ids, "first", sampling=Sampling(4), spans=tuple(spans))

    async def ask(self, strategy: str, tier: str = "", **fields: Any) -> float:
        """Milliseconds of a whole answer."""
        if tier == "device":
            await self._engine.warm(self._request)
        elif tier:
            await self._engine.control("flush", timeout_s=60)
            await in_tier(self._engine, tier)
        ids = self._request.input_ids + random_tokens(self._draw, QUESTION)
        answer = await first_token(
            self._engine, replace(self._request, input_ids=ids, strategy=strategy, **fields)
        )
        if tier and answer.tiers != {tier}:
            raise SystemExit(f"{strategy}: not from {tier} but from {answer.tiers}: {answer.first.fallback}")
        return (answer.chunks[-1][0] - answer.started) * 1e3

    async def prefill(self) -> float:
        """Milliseconds until new documents are cached."""
        started = asyncio.get_running_loop().time()
        await self._engine.warm(self._documents())
        return (asyncio.get_running_loop().time() - started) * 1e3

    def all(self) -> dict[str, Callable[[], Awaitable[float]]]:
        sampled = Sampling(4, temperature=0.7, top_p=0.8)
        kinds: dict[str, Callable[[], Awaitable[float]]] = {
            "full": partial(self.ask, "full"),
            "sampled": partial(self.ask, "full", sampling=sampled),
            "documents": self.prefill,
        }
        for tier in ("device", "host"):
            for strategy, options in STRATEGIES.items():
                kinds[f"{strategy} from {tier}"] = partial(self.ask, strategy, tier, options=options)
        for name, decode in DECODE.items() if self._engine.info.hosted_tokens else ():
            long = Sampling(24, ignore_eos=True)
            kinds[f"decode {name}"] = partial(self.ask, "full", decode=decode, sampling=long)
        return kinds


async def measure(out: Path, engine: Any) -> None:
    kinds = Kinds(engine)
    await kinds.ask("prefix")  # fills the cache
    found = {}
    for kind, ask in ({"prefix hit": partial(kinds.ask, "prefix")} | kinds.all()).items():
        found[kind] = [round(await ask(), 2) for _ in range(TIMES)]
    info = {"start_s": engine.info.start_s, "warm_up_s": engine.info.warm_up_s}
    out.write_text(json.dumps({"ms": found, **info}))


if __name__ == "__main__":
    from ragserve.config import DEFAULT_MODEL, load
    from ragserve.engine.offline import run_once

    attention = os.environ.get("RAGSERVE_ATTENTION")
    options = {"attention_backend": attention} if attention else {}
    sparse = {"sparse_attention": "on", "kv_hosted_bytes": 2**30} if sys.argv[3:] == ["sparse"] else {}
    settings = load(model=DEFAULT_MODEL, data_dir=Path(sys.argv[1]), engine_args=options, **sparse)
    run_once(settings, partial(measure, Path(sys.argv[2])))
