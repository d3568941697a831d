"""What the context benchmark asks of the engine before each figure, and that it takes no figure from the wrong tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ragserve.bench import context, in_process
from ragserve.bench.context import Case
from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.errors import EngineError
from sglang_ext.protocol import ContextReport


class Engine:
    """Answers at once; its documents sink a tier with each eviction, as the real ones do."""

    def __init__(self, *, sticky: bool = False) -> None:
        self.sticky = sticky
        self.tier = ""
        self.asked: list[tuple[str, str]] = []

    async def warm(self, request: GenerateRequest) -> None:
        assert request.spans[-1].end == len(request.input_ids)
        self.tier = "device"

    async def control(self, operation: str, *, tiers: tuple[str, ...] = (), timeout_s: float = 0) -> dict[str, Any]:
        assert operation in ("evict", "flush")
        if tiers and not self.sticky:
            self.tier = {"device": "host", "host": "disk"}[tiers[-1]]
        return {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        exact = request.strategy in ("full", "prefix")
        self.asked.append((request.strategy, "" if exact else self.tier))
        report = None if exact else ContextReport(request.strategy, 64, 64, 3, {self.tier: 64}, 1.0, 2.0, 3.0, 4.0)
        yield GenerateChunk("", EngineUsage(), EngineTimings(queue_ms=5.0), None, report)
        yield GenerateChunk("", EngineUsage(), EngineTimings(), "length", report)


CASES = (Case("all", "full"), Case("some", "concat", {"keep": 0.5}, ("device", "disk")), Case("more", "epic", {}, ("device", "host")))


def rows(engine: Engine, full_ms: dict[int, float]) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [row async for row in context._rows(engine, 64, 16, CASES, full_ms, 2)]

    return asyncio.run(collect())


def test_every_case_is_measured_in_its_tiers_from_the_top_after_a_warm_up() -> None:
    engine, full_ms = Engine(), {}
    found = rows(engine, full_ms)
    wanted = [("full", ""), ("concat", "device"), ("epic", "device"), ("epic", "host"), ("concat", "disk")]
    assert engine.asked == [each for each in wanted for _ in range(3)]
    assert [(row["strategy"], row["tier"]) for row in found[1:]] == [
        ("some", "device"),
        ("more", "device"),
        ("more", "host"),
        ("some", "disk"),
    ]
    assert set(full_ms) == {64}
    for row in found[1:]:
        assert (row["kept"], row["recomputed"], row["compose ms"], row["load ms"], row["extend ms"]) == (64, 3, 1.0, 2.0, 4.0)
        assert row["queue ms"] == 3.0, "what the load took is not counted twice"
        assert row["other ms"] == pytest.approx(row["ttft ms"] - 1.0 - 2.0 - 3.0 - 4.0 - 3.0, abs=0.2)


def test_full_is_measured_once_a_length() -> None:
    engine = Engine()
    assert [row["strategy"] for row in rows(engine, {64: 100.0})] == ["some", "more", "more", "some"]
    assert ("full", "") not in engine.asked


def test_documents_from_another_tier_end_the_benchmark() -> None:
    with pytest.raises(EngineError, match="should have come from host"):
        rows(Engine(sticky=True), {})


def test_bytes_per_token_of_a_shape() -> None:
    assert in_process.kv_bytes_per_token("llama-3.1-8b") == 128 * 1024
