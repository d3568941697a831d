"""Measure from which context length on sparse decode steps are faster than dense ones on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ragserve.engine.base import Engine
from ragserve.errors import InvalidRequest
from ragserve.measuring.engine_run import decode_step, doubling, prefill, random_tokens
from ragserve.profiles.decode import Point

_SHORTEST = 1024
_RUNS = 3
_NAMESPACE = "calibration"


def lengths(shortest: int, longest: int) -> list[int]:
    """Context lengths to measure: doubling, then the longest. Raises InvalidRequest if there are fewer than
    two."""
    found = doubling(max(_SHORTEST, shortest), longest)
    if len(found) < 2 or longest <= shortest:
        raise InvalidRequest(
            f"Contexts of {longest} tokens are too short to compare dense and sparse decoding.",
            hint="Give the engine more --max-total-tokens, ask for a smaller --batch, or lower "
            "--decode-budget.",
        )
    return found


async def measure(
    engine: Engine,
    options: dict[str, Any],
    *,
    batch: int,
    max_tokens: int | None,
    tokens: int,
    report: Callable[[str], None],
) -> list[Point]:
    """Time dense and sparse decode steps at each context length that ``batch`` requests fit with.

    Args:
        options: Decode options of the sparse requests.
        batch: Requests that decode at the same time.
        max_tokens: Longest context; None for the longest that the engine takes.
        tokens: Tokens that each request generates.
        report: Gets a line for each length.
    """
    room = engine.info.max_total_tokens // batch - tokens - 128
    longest = min(room, engine.info.max_prompt_tokens - tokens - 8, max_tokens or room)
    draw = random.Random(0)
    points = []
    for length in lengths(2 * int(options.get("budget", 0)), longest):
        contexts = [random_tokens(draw, length) for _ in range(batch)]
        await prefill(engine, contexts, _NAMESPACE)
        took = []
        for mode in ({"mode": "dense"}, options | {"dense_below": 0}):
            runs = [
                await decode_step(engine, contexts, mode, namespace=_NAMESPACE, tokens=tokens)
                for _ in range(_RUNS)
            ]
            took.append(round(1e3 * min(seconds for seconds, _ in runs[1:]), 3))  # the first run warms up
        points.append(Point(length, *took))
        report(
            f"{length} tokens x {batch}: dense {points[-1].dense_ms:.2f} ms a step, sparse "
            f"{points[-1].sparse_ms:.2f} ms"
        )
        await engine.forget(_NAMESPACE, None)
    return points
