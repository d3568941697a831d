"""Open-loop load: Poisson arrivals sent to an engine whether or not it keeps up, and how they were
answered."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.verification.engine_run import first_token
from ragserve.verification.report import percentile

SEED = 0
DRAIN_S = 30.0  # to answer the last arrivals
_WATCH_S = 0.1


@dataclass
class LoadOutcome:
    """The answers at one rate. ``ttft_s`` counts seconds from a request's arrival, not from its sending, to
    its first token.

    ``broken``: aborted as soon as p99 could no longer be within the limit; the figures cover what came until
    then."""

    rate: float
    arrivals: int
    ttft_s: list[float] = field(default_factory=list)
    last: list[GenerateChunk] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    broken: bool = False
    longest: tuple[float, float, int, GenerateChunk] | None = None
    """Of the answer with the longest TTFT: that, its arrival in seconds from the start, how many requests had
    no first token when it got its own, and its last chunk."""

    @property
    def p99_s(self) -> float:
        return percentile(self.ttft_s, 99) if self.ttft_s else float("inf")

    def within(self, limit_s: float) -> bool:
        """Tell whether every request was answered, with p99 of TTFT within the limit."""
        return (
            not self.broken
            and not self.errors
            and len(self.ttft_s) == self.arrivals
            and self.p99_s <= limit_s
        )


def arrival_times(rate: float, seconds: float, *, seed: int = SEED) -> list[float]:
    """Draw arrivals in seconds from the start, at least one. A seed gives the same pattern at every rate,
    only faster or slower."""
    draw = random.Random(seed)
    times = [draw.expovariate(1.0) / rate]
    while (at := times[-1] + draw.expovariate(1.0) / rate) < seconds:
        times.append(at)
    return times


async def offer(
    engine: Any, make: Callable[[int], GenerateRequest], rate: float, seconds: float, limit_s: float
) -> LoadOutcome:
    """Send ``make(i)`` at the i-th arrival, until all are answered, or aborted because the rate is too
    high."""
    times = arrival_times(rate, seconds)
    outcome = LoadOutcome(rate, len(times))
    waiting: dict[int, float] = {}  # arrival times of requests without a first token, by number
    clock = asyncio.get_running_loop().time
    started = clock()

    async def one(number: int, at: float) -> None:
        await asyncio.sleep(max(0.0, started + at - clock()))
        waiting[number] = started + at
        took = others = 0.0

        def on_first(seconds: float) -> None:
            nonlocal took, others
            del waiting[number]
            took, others = seconds, len(waiting)
            outcome.ttft_s.append(seconds)

        try:
            answer = await first_token(
                engine, make(number), clock=clock, started=started + at, on_first=on_first
            )
            outcome.last.append(answer.last)
            if outcome.longest is None or took > outcome.longest[0]:
                outcome.longest = took, at, int(others), answer.last
        except Exception as error:  # noqa: BLE001 - counted: the rate is then not served
            outcome.errors.append(f"{type(error).__name__}: {error}")
        finally:
            waiting.pop(number, None)

    tasks = [asyncio.create_task(one(number, at)) for number, at in enumerate(times)]
    allowed = 1 + len(times) // 100  # late requests: with more, p99 is late too
    while pending := [task for task in tasks if not task.done()]:
        await asyncio.wait(pending, timeout=_WATCH_S)
        now = clock()
        late = sum(now - came > limit_s for came in waiting.values()) + sum(
            ttft > limit_s for ttft in outcome.ttft_s
        )
        if late > allowed or now - started > times[-1] + limit_s + DRAIN_S:
            outcome.broken = True
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
    outcome.seconds = clock() - started
    return outcome


async def capacity(
    engine: Any, make: Callable[[int], GenerateRequest], at_once: int, seconds: float
) -> float:
    """Count first tokens a second with ``at_once`` requests always in flight: about the highest rate
    possible."""
    numbers = itertools.count()
    clock = asyncio.get_running_loop().time
    started, first = clock(), 0

    async def client() -> None:
        nonlocal first
        while clock() - started < seconds:
            async with aclosing(engine.generate(make(next(numbers)))) as chunks:
                counted = False
                async for _ in chunks:
                    first += not counted
                    counted = True
                    if clock() - started >= seconds:
                        return

    clients = [asyncio.create_task(client()) for _ in range(at_once)]
    done, pending = await asyncio.wait(
        clients, timeout=seconds + DRAIN_S, return_when=asyncio.FIRST_EXCEPTION
    )
    elapsed = clock() - started
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()  # raises the task's error
    return first / elapsed
