"""Measure on this machine what contexts cost until their first token, for the model of
`ragserve.profiles.costs`.

Prompts are random tokens of exact lengths with documents of equal size, one request at a time: costs depend
on counts and tiers, not on words. Runs in an engine without the product around it
(`ragserve.engine.offline`)."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ragserve.engine.base import Engine, GenerateRequest, Sampling
from ragserve.engine.document_cache import CachingEngine, Whereabouts
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.profiles.costs import ABSENT, CostSample
from ragserve.strategy_spec import StrategySpec
from ragserve.verification.engine_run import REMOTE, TIERS, doubling, first_token, in_tier, random_tokens
from sglang_ext.wire.own_names import own_name
from sglang_ext.wire.protocol import Span, document_key, pieces_of

NAMESPACE = own_name("calibration")
SYSTEM_TOKENS, QUESTION_TOKENS = 16, 32
_RESERVED_TOKENS = 8
_MIN_TOKENS = 256


class CostEngine(Engine, CachingEngine, Protocol):
    """An engine whose costs can be measured."""


@dataclass(frozen=True, slots=True)
class CostSchedule:
    """Context lengths to measure: ``_MIN_TOKENS`` tokens of system text and documents, doubled up to
    ``max_tokens`` (None: what the engine takes)."""

    max_tokens: int | None = None
    document_tokens: int = 256
    repeats: int = 3

    def lengths(self, engine: CostEngine) -> list[int]:
        """Context lengths in tokens. Raises InvalidRequest if the engine takes too few to see a curve."""
        longest = engine.info.max_prompt_tokens - QUESTION_TOKENS - _RESERVED_TOKENS
        longest = min(longest, self.max_tokens) if self.max_tokens else longest
        lengths = doubling(_MIN_TOKENS, longest)
        if len(lengths) > 3 and longest < lengths[-2] * 1.5:
            del lengths[-2]  # it says little beside the longest, and both take longest
        if len(lengths) >= 3 and longest >= lengths[-2] * 1.2:
            return lengths
        if longest < 64:
            raise InvalidRequest(
                f"Prompts of {longest} tokens are too short to calibrate by.",
                hint="Raise --max-tokens or the context.",
            )
        return [longest // 4, longest // 2, longest]


async def measure(
    engine: CostEngine,
    strategies: Sequence[StrategySpec],
    schedule: CostSchedule,
    report: Callable[[str], None],
) -> list[CostSample]:
    """Measure exact prefill, and each strategy with its documents in each tier and in none; ``report`` gets a
    line for each.

    A tier too small for a prompt's documents is skipped, and reported as such."""
    measurement = CostMeasurement(engine, strategies, schedule, report)
    while not measurement.finished:
        await measurement.step()
    return measurement.samples


class CostMeasurement:
    """The same case by case. A case that is cancelled is measured again by the next step."""

    def __init__(
        self,
        engine: CostEngine,
        strategies: Sequence[StrategySpec],
        schedule: CostSchedule,
        report: Callable[[str], None],
    ) -> None:
        self.samples: list[CostSample] = []
        self._engine = engine
        self._report = report
        self._probe = _Probe(engine, schedule)
        self._cases: deque[Callable[[], Awaitable[list[CostSample]]]] = deque()
        for length in schedule.lengths(engine):
            self._cases.append(partial(self._exact, length))
            for spec in strategies:
                self._cases += [partial(self._composed, spec, tier, length) for tier in (*TIERS, REMOTE)]
                self._cases.append(partial(self._absent, spec, length))
            self._cases.append(self.forget)

    @property
    def finished(self) -> bool:
        """All cases have been measured."""
        return not self._cases

    async def step(self) -> None:
        """Measure the next case. Raises what the engine raises."""
        try:
            self.samples += await self._cases[0]()
        except RagserveError:
            with contextlib.suppress(RagserveError):  # which may be away
                await self.forget()
            raise
        self._cases.popleft()

    async def _exact(self, length: int) -> list[CostSample]:
        found = [sample async for sample in self._probe.exact(length)]
        for sample in found:
            self._report(f"exact, {sample.tokens} tokens, {sample.cached} cached: {sample.ms:.1f} ms")
        return found

    async def _composed(self, spec: StrategySpec, tier: str, length: int) -> list[CostSample]:
        if tier == REMOTE and not (await self._engine.control("stat")).get("remote"):
            return []
        found = await self._probe.composed(spec, tier, length)
        took = f"{found.ms:.1f} ms" if found else "the documents do not all fit there"
        self._report(f"{spec.label}, {length} document tokens, {tier}: {took}")
        return [found] if found else []

    async def _absent(self, spec: StrategySpec, length: int) -> list[CostSample]:
        found = await self._probe.absent(spec, length)
        self._report(f"{spec.label}, {length} document tokens, cached nowhere: {found.ms:.1f} ms")
        return [found]

    async def forget(self) -> list[CostSample]:
        """Remove the documents that are measured with from every tier."""
        await self._engine.forget(NAMESPACE, None)
        return []


class _Probe:
    """Times requests; every repetition has new tokens wherever nothing may be cached."""

    def __init__(self, engine: CostEngine, schedule: CostSchedule) -> None:
        self._engine = engine
        self._schedule = schedule
        self._draw = random.Random(0)
        self._documents: dict[int, list[int]] = {}  # by context length

    async def exact(self, length: int) -> AsyncIterator[CostSample]:
        """Measure a prompt of which nothing is cached, then one whose first half is."""
        yield CostSample(length, await self._median("full", [], length))
        half = self._tokens(length // 2)
        await first_token(
            self._engine, _request(StrategySpec("prefix"), half + self._tokens(QUESTION_TOKENS))
        )
        yield CostSample(length, await self._median("prefix", half, length), cached=len(half))

    async def composed(self, spec: StrategySpec, tier: str, length: int) -> CostSample | None:
        """Measure a composed context with all documents in ``tier``; None if some were elsewhere."""
        documents, spans = self._documents.setdefault(length, self._tokens(length)), self._spans(length)
        pieces = pieces_of(documents, spans)
        if not _are_in(await self._engine.where(NAMESPACE, pieces), tier):
            await self._engine.warm(_request(spec, documents, spans))
        fingerprint = (await self._engine.control("info"))["fingerprint"]
        keys = [document_key(NAMESPACE, fingerprint, piece) for piece in pieces]
        taken = []
        for _ in range(self._schedule.repeats + 1):
            if tier != "device":
                await self._engine.control("flush")
            await in_tier(self._engine, tier, keys, NAMESPACE)
            question = documents + self._tokens(QUESTION_TOKENS)
            answer = await first_token(self._engine, _request(spec, question, spans))
            if answer.tiers != {tier}:
                return None
            taken.append(answer.ttft_ms)
        return CostSample(length, statistics.median(taken[1:]), strategy=spec.label, tier=tier)

    async def absent(self, spec: StrategySpec, length: int) -> CostSample:
        """Measure a composed context whose documents are new, twice at most: they are slow, and other cases
        have warmed the engine up."""
        taken = []
        for _ in range(min(2, self._schedule.repeats)):
            ids = self._tokens(length + QUESTION_TOKENS)
            answer = await first_token(self._engine, _request(spec, ids, self._spans(length)))
            taken.append(answer.ttft_ms)
        return CostSample(length, statistics.median(taken), strategy=spec.label, tier=ABSENT)

    def _spans(self, length: int) -> tuple[Span, ...]:
        """The system text and documents of the schedule's size."""
        size = self._schedule.document_tokens
        return (
            Span(0, SYSTEM_TOKENS),
            *(Span(a, min(a + size, length)) for a in range(SYSTEM_TOKENS, length, size)),
        )

    async def _median(self, strategy: str, cached: list[int], length: int) -> float:
        """Median TTFT in milliseconds over prompts that begin with ``cached``, without the first run."""
        taken = []
        for _ in range(self._schedule.repeats + 1):
            ids = cached + self._tokens(length - len(cached))
            taken.append((await first_token(self._engine, _request(StrategySpec(strategy), ids))).ttft_ms)
        return statistics.median(taken[1:])

    def _tokens(self, count: int) -> list[int]:
        return random_tokens(self._draw, count)


def _are_in(places: Whereabouts, tier: str) -> bool:
    """Whether a tier below the device has documents from an earlier case. Warming would compute them again
    if the device has not got them."""
    if tier == "device":
        return False
    if tier == "host":
        return all(places.on_host)
    return all(below in ("disk", "writing") or below == tier for below in places.below)


def _request(spec: StrategySpec, ids: list[int], spans: tuple[Span, ...] = ()) -> GenerateRequest:
    sampling = Sampling(max_new_tokens=1)
    return GenerateRequest("calibrate", ids, NAMESPACE, spec.name, sampling, spans, spec.options)
