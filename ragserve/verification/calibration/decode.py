"""Measure from which context length on sparse decode steps are faster than dense ones on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ragserve.config import Settings
from ragserve.engine.base import Engine
from ragserve.errors import InvalidRequest
from ragserve.profiles.decode import DECODE, FILE_NAME, DecodeProfile, Point, crossover, options_of
from ragserve.verification.engine_run import DECODE_TOKENS, decode_step, doubling, prefill, random_tokens
from ragserve.verification.report import measured_on
from sglang_ext.wire.own_names import own_name

_SHORTEST = 1024
_RUNS = 3
_FEWEST = 2  # lengths that show a crossover
_NAMESPACE = own_name("calibration")
BATCH = 4  # requests that decode at once, by default


def lengths(shortest: int, longest: int) -> list[int]:
    """Context lengths to measure: doubling, then the longest. Raises InvalidRequest if there are fewer than
    two."""
    found = doubling(max(_SHORTEST, shortest), longest)
    if len(found) < _FEWEST or longest <= shortest:
        raise InvalidRequest(
            f"Contexts of {longest} tokens are too short to compare dense and sparse decoding.",
            hint="Give the engine more --max-total-tokens, ask for a smaller --batch, or lower "
            "--decode-budget.",
        )
    return found


def enough(settings: Settings, prompt_tokens: int) -> int:
    """The longest context to measure, in tokens, for a server whose prompts have up to ``prompt_tokens``:
    twice that, and at least twice the shortest length that is measured."""
    shortest = max(_SHORTEST, 2 * int(options_of(settings).get("budget", 0)))
    return 2 * max(prompt_tokens, shortest)


async def find_and_save(
    settings: Settings,
    engine: Engine,
    *,
    batch: int = BATCH,
    max_tokens: int | None = None,
    tokens: int = DECODE_TOKENS,
    report: Callable[[str], None],
    time_left: Callable[[], bool] = lambda: True,
) -> DecodeProfile:
    """Measure an engine with ``sparse_attention``, and write the profile to the data folder of ``settings``.
    The other arguments are those of `measure`.

    Raises InvalidRequest where contexts are too short, or decoding is dense."""
    options = options_of(settings)
    points = await measure(
        engine,
        options,
        batch=batch,
        max_tokens=max_tokens,
        tokens=tokens,
        report=report,
        time_left=time_left,
    )
    found = DecodeProfile(crossover(points), options, batch, tuple(points), **measured_on(settings.model))
    DECODE.save(settings.data_dir / FILE_NAME, engine.info.fingerprint, found)
    return found


async def measure(
    engine: Engine,
    options: dict[str, Any],
    *,
    batch: int,
    max_tokens: int | None,
    tokens: int,
    report: Callable[[str], None],
    time_left: Callable[[], bool] = lambda: True,
) -> list[Point]:
    """Time dense and sparse decode steps at each context length that ``batch`` requests fit with.

    Args:
        options: Decode options of the sparse requests.
        batch: Requests that decode at the same time.
        max_tokens: Longest context; None for the longest that the engine takes.
        tokens: Tokens that each request generates.
        report: Gets a line for each length.
        time_left: After two lengths, no other is begun without.
    """
    room = engine.info.max_total_tokens // batch - tokens - 128
    longest = min(room, engine.info.max_prompt_tokens - tokens - 8, max_tokens or room)
    draw = random.Random(0)
    points: list[Point] = []
    for length in lengths(2 * int(options.get("budget", 0)), longest):
        if len(points) >= _FEWEST and not time_left():
            break
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
