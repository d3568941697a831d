"""Time the first request of every kind to an engine that is ready, and later ones, as JSON: milliseconds by
kind, in order, and the kernels that were compiled or loaded for each kind. The prompts are none of the
warm-up's.

    python -m tests.integration.first_requests_main DATA_FOLDER OUT.json [MODE [ENGINE]]

MODE: dense, the default; pages: with documents' pages of 8 bits; sparse: with sparse decoding and offloaded
requests, and their kinds; bits: with sparse decoding of KV of 8 bits. ENGINE: options of SGLang's, as JSON.
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
from ragserve.errors import EngineError, RagserveError
from ragserve.verification.engine_run import first_token, in_tier, random_tokens
from sglang_ext.wire.protocol import SessionPart, Span, session_key

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
}
EXACT = DECODE["hierarchical"] | {"scores": "exact"}
OFFLOADED = {f"offloaded {name}": decode | {"offloaded": True} for name, decode in DECODE.items()}
PREFILL: dict[str, dict[str, Any]] = {
    name: {"mode": name, "dense_below": 0} for name in ("vertical_slash", "block_sparse")
}
LONG = Sampling(24, ignore_eos=True)
MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"sparse_attention": "on", "kv_offload_bytes": 2**30},
    "bits": {"sparse_attention": "on", "kv_bits": 8},
    "pages": {"kv_page_bits": 8},
}


class Kinds:
    """Asks requests over documents that are drawn once, each with a question of its own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._draw = random.Random(5)
        self._request = self._documents()
        self._sessions = 0

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
            raise EngineError(f"{strategy}: not from {tier} but from {answer.tiers}: {answer.first.fallback}")
        return (answer.chunks[-1][0] - answer.started) * 1e3

    async def prefill(self) -> float:
        """Milliseconds until new documents are cached."""
        started = asyncio.get_running_loop().time()
        await self._engine.warm(self._documents())
        return (asyncio.get_running_loop().time() - started) * 1e3

    async def second_turn(self, strategy: str, options: dict[str, Any]) -> float:
        """Milliseconds of the second turn of a new session: it brings a document more."""
        self._sessions += 1
        key = session_key(self._request.namespace, str(self._sessions))
        ids = self._request.input_ids + random_tokens(self._draw, QUESTION)
        first = replace(
            self._request, input_ids=ids, strategy=strategy, options=options, session=SessionPart(key)
        )
        await first_token(self._engine, first)
        start, end = len(ids) + QUESTION, len(ids) + QUESTION + DOCUMENTS[2]
        held = 0 if strategy == "prefix" else first.spans[-1].end
        second = replace(
            first,
            input_ids=ids + random_tokens(self._draw, end - len(ids) + QUESTION),
            spans=(Span(0, start), Span(start, end)),
            session=SessionPart(key, held),
            earlier=lambda: first,
        )
        if held:
            await self._engine.warm(replace(second, session=None, spans=second.spans[1:]))
        answer = await first_token(self._engine, second)
        return (answer.chunks[-1][0] - answer.started) * 1e3

    async def by_layers(self) -> float:
        """Milliseconds of an answer to a prompt that is prefilled onto the host layer by layer."""
        await self._engine.control("segment")
        ids = random_tokens(self._draw, SYSTEM + sum(DOCUMENTS) + QUESTION)
        request = replace(self._request, input_ids=ids, strategy="full", sampling=LONG, spans=())
        answer = await first_token(self._engine, replace(request, decode=OFFLOADED["offloaded hierarchical"]))
        if answer.last.decode is None or not answer.last.decode.segmented_tokens:
            raise EngineError(f"the prompt was not prefilled by layers: {answer.last.decode}")
        return (answer.chunks[-1][0] - answer.started) * 1e3

    def all(self) -> dict[str, Callable[[], Awaitable[float]]]:
        sampled = Sampling(4, temperature=0.7, top_p=0.8)
        info = self._engine.info
        kinds: dict[str, Callable[[], Awaitable[float]]] = {
            "full": partial(self.ask, "full"),
            "sampled": partial(self.ask, "full", sampling=sampled),
        }
        if not info.only_exact:
            kinds["documents"] = self.prefill
        for tier in () if info.only_exact else ("device", "host"):
            for strategy, options in STRATEGIES.items():
                kinds[f"{strategy} from {tier}"] = partial(self.ask, strategy, tier, options=options)
        kinds["turn"] = partial(self.second_turn, "prefix", {})
        if not info.only_exact:
            kinds["composed turn"] = partial(
                self.second_turn, "concat", {"recompute": "sentences", "share": 0.1}
            )
        decode = dict(DECODE) if info.sparse_decode else {}
        if info.sparse_prefill:
            decode["exact"] = EXACT
            for name, prefill in PREFILL.items():
                kinds[f"prefill {name}"] = partial(self.ask, "full", prefill=prefill)
        if info.offloaded_tokens:
            decode |= OFFLOADED
        for name, fields in decode.items():
            kinds[f"decode {name}"] = partial(self.ask, "full", decode=fields, sampling=LONG)
        if info.offloaded_tokens:
            offloaded = OFFLOADED["offloaded hierarchical"]
            kinds["prompt by layers"] = self.by_layers
            kinds["composed on the host"] = partial(
                self.ask, "concat", "host", decode=offloaded, sampling=LONG
            )
        return kinds


async def measure(out: Path, engine: Any) -> None:
    kinds = Kinds(engine)
    await kinds.ask("prefix")  # fills the cache
    found, compiled, failed = {}, {}, {}
    for kind, ask in ({"prefix hit": partial(kinds.ask, "prefix")} | kinds.all()).items():
        before = (await engine.control("compiled"))["count"]
        try:
            found[kind] = [round(await ask(), 2) for _ in range(TIMES)]
        except RagserveError as error:  # the others go on
            failed[kind] = str(error)
        compiled[kind] = (await engine.control("compiled", since=before))["latest"]
    total = await engine.control("compiled")
    info = {"start_s": engine.info.start_s, "warm_up_s": engine.info.warm_up_s}
    kernels = {"kernels": total["count"], "kernels_s": total["seconds"]}
    out.write_text(json.dumps({"ms": found, "compiled": compiled, "failed": failed, **info, **kernels}))


if __name__ == "__main__":
    from ragserve.config import DEFAULT_MODEL, load
    from ragserve.engine.offline import run_once

    attention = os.environ.get("RAGSERVE_ATTENTION")
    options = {"attention_backend": attention} if attention else {}
    mode = MODES[sys.argv[3] if sys.argv[3:] else "dense"]
    options |= json.loads(sys.argv[4]) if sys.argv[4:] else {}
    settings = load(model=DEFAULT_MODEL, data_dir=Path(sys.argv[1]), engine_args=options, **mode)
    run_once(settings, partial(measure, Path(sys.argv[2])))
