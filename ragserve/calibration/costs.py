"""Measure on this machine what contexts cost until their first token, for the model of
`ragserve.profiles.costs`.

Prompts are random tokens of exact lengths, documents of equal size, one request at a time: costs depend on
counts and tiers, not on words. Runs in an engine without the product around it (`ragserve.engine.offline`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.local import LocalEngine
from ragserve.errors import InvalidRequest
from ragserve.profiles.costs import TIERS, CostSample
from ragserve.strategy_spec import StrategySpec
from sglang_ext.protocol import ContextReport, Span

NAMESPACE = "calibration"
SYSTEM_TOKENS, QUESTION_TOKENS = 16, 32
_RESERVED_TOKENS = 8
_MIN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class CostSchedule:
    """What to measure.

    Contexts (system text and documents) of ``_MIN_TOKENS`` tokens, doubled up to ``max_tokens`` (None: what
    the engine takes)."""

    max_tokens: int | None = None
    document_tokens: int = 256
    repeats: int = 3
    vocabulary: int = 8000  # random tokens are below it

    def lengths(self, engine: LocalEngine) -> list[int]:
        """Tokens of contexts. Raises InvalidRequest where the engine takes too few to see a curve."""
        most = engine.info.max_prompt_tokens - QUESTION_TOKENS - _RESERVED_TOKENS
        most = min(most, self.max_tokens) if self.max_tokens else most
        lengths = []
        length = _MIN_TOKENS
        while length < most:
            lengths.append(length)
            length *= 2
        lengths.append(most)
        if len(lengths) < 3 or most < lengths[-2] * 1.2:
            lengths = [most // 4, most // 2, most] if most >= 64 else []
        if not lengths:
            raise InvalidRequest(
                f"Prompts of {most} tokens are too short to calibrate by.",
                hint="Raise --max-tokens or the context.",
            )
        return lengths


async def measure(
    engine: LocalEngine,
    strategies: Sequence[StrategySpec],
    schedule: CostSchedule,
    report: Callable[[str], None],
) -> list[CostSample]:
    """Samples of exact prefill and of each strategy with its documents in each tier; ``report`` gets a line
    for each.

    A tier that cannot hold a prompt's documents is left out where it cannot, which is reported, too.
    """
    probe = _Probe(engine, schedule)
    samples: list[CostSample] = []
    for length in schedule.lengths(engine):
        async for sample in probe.exact(length):
            report(f"exact, {sample.tokens} tokens, {sample.cached} cached: {sample.ms:.1f} ms")
            samples.append(sample)
        for spec in strategies:
            for tier in TIERS:
                found = await probe.composed(spec, tier, length)
                took = f"{found.ms:.1f} ms" if found else "not all of them fit there"
                report(f"{spec.label}, {length} document tokens, {tier}: {took}")
                samples += [found] if found else []
        await engine.forget(NAMESPACE, None)
    return samples


class _Probe:
    """Times requests. Every repetition has new tokens where nothing may be cached."""

    def __init__(self, engine: LocalEngine, schedule: CostSchedule) -> None:
        self._engine = engine
        self._schedule = schedule
        self._draw = random.Random(0)
        self._documents: dict[int, list[int]] = {}

    async def exact(self, length: int) -> AsyncIterator[CostSample]:
        """Nothing cached, then the first half."""
        yield CostSample(length, await self._median(lambda: self._request("full", self._ids(length))))
        half = self._ids(length // 2)
        await self._first_token(self._request("prefix", [*half, *self._ids(QUESTION_TOKENS)]))
        yield CostSample(
            length,
            await self._median(lambda: self._request("prefix", half + self._ids(length - len(half)))),
            cached=len(half),
        )

    async def composed(self, spec: StrategySpec, tier: str, length: int) -> CostSample | None:
        """All documents in ``tier``; None where they were not."""
        documents = self._documents.setdefault(length, self._ids(length))
        size = self._schedule.document_tokens
        spans = (
            Span(0, SYSTEM_TOKENS),
            *(Span(a, min(a + size, length)) for a in range(SYSTEM_TOKENS, length, size)),
        )
        request = self._request(spec.name, documents, spans, spec)
        await self._engine.warm(request)
        taken = []
        for _ in range(self._schedule.repeats + 1):
            if tier != "device":
                await self._engine.control("flush")
                await self._engine.control(
                    "evict", tiers=["device", "host"] if tier == "disk" else ["device"]
                )
            question = self._request(spec.name, documents + self._ids(QUESTION_TOKENS), spans, spec)
            ms, done = await self._first_token(question)
            if done is None or set(done.by_tier) != {tier}:
                return None
            taken.append(ms)
        return CostSample(length, statistics.median(taken[1:]), strategy=spec.label, tier=tier)

    async def _median(self, request: Callable[[], GenerateRequest]) -> float:
        taken = [(await self._first_token(request()))[0] for _ in range(self._schedule.repeats + 1)]
        return statistics.median(taken[1:])

    async def _first_token(self, request: GenerateRequest) -> tuple[float, ContextReport | None]:
        """Milliseconds, and what was composed."""
        started = time.perf_counter()
        first, done = 0.0, None
        async for chunk in self._engine.generate(request):
            first = first or (time.perf_counter() - started) * 1e3
            done = chunk.context or done
        return first, done

    def _request(
        self, strategy: str, ids: list[int], spans: tuple[Span, ...] = (), spec: StrategySpec | None = None
    ) -> GenerateRequest:
        return GenerateRequest(
            "calibrate",
            ids,
            NAMESPACE,
            strategy,
            Sampling(max_new_tokens=1),
            spans,
            spec.options if spec else {},
        )

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(10, self._schedule.vocabulary) for _ in range(count)]
