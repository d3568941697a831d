"""Seconds of a decode step, measured over many steps of a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragserve.engine.base import Engine, GenerateRequest, Sampling
from ragserve.errors import EngineError
from sglang_ext.protocol import DecodeReport

TOKENS = 96  # generated per request


SETTLE = 16  # first tokens of every request that are not counted


async def step_seconds(
    engine: Engine,
    contexts: Sequence[list[int]],
    options: Mapping[str, Any],
    *,
    namespace: str = "bench",
    tokens: int = TOKENS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, DecodeReport | None]:
    """Seconds a step while requests over all ``contexts`` decode ``tokens`` tokens each, and what the last
    one to end says it read.

    The first SETTLE tokens do not count, or a quarter of them where they are few. Raises EngineError where
    the requests did not all decode at the same time."""
    clocks: list[list[tuple[float, int]]] = [[] for _ in contexts]
    said: list[DecodeReport] = []
    settle = min(SETTLE, tokens // 4)

    async def one(number: int, ids: list[int]) -> None:
        request = GenerateRequest(
            "decode",
            ids,
            namespace,
            "prefix",
            Sampling(max_new_tokens=tokens, ignore_eos=True),
            decode=options,
        )
        async for chunk in engine.generate(request):
            clocks[number].append((clock(), chunk.usage.completion))
            if chunk.decode is not None:
                said.append(chunk.decode)

    await asyncio.gather(*(one(number, ids) for number, ids in enumerate(contexts)))
    begin = max(next((at for at, count in times if count >= settle), times[-1][0]) for times in clocks)
    end = min(times[-1][0] for times in clocks)
    steps = [
        max(c for t, c in times if t <= end) - max(c for t, c in times if t <= begin) for times in clocks
    ]
    if end <= begin or not min(steps):
        raise EngineError(
            f"The {len(contexts)} requests did not decode at the same time.",
            hint="Raise max_total_tokens, or lower the batch.",
        )
    return (end - begin) / (sum(steps) / len(steps)), said[-1] if said else None
