"""Timed requests, on an engine that turns the clock itself; and the report that grows row by row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.errors import EngineError
from ragserve.verification.engine_run import first_token, in_tier
from ragserve.verification.report import GrowingReport
from sglang_ext.wire.protocol import ContextReport

REQUEST = GenerateRequest("r", [1, 2], "n", "concat")


class Engine:
    """Takes a second for each chunk."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.now = 5.0
        self.evicted: list[list[str]] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        context = ContextReport("concat", 4, 4, 0, {"host": 4, "disk": 0}, 0.0, 0.0, 0.0)
        for text in self.texts:
            self.now += 1
            yield GenerateChunk(text, EngineUsage(), EngineTimings(), None, context)

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self.evicted.append(arguments["tiers"])
        return {}


def test_the_first_token_is_timed_and_the_whole_answer_read() -> None:
    engine, seen = Engine("a", "b"), []
    answer = asyncio.run(
        first_token(engine, REQUEST, clock=lambda: engine.now, started=3.0, on_first=seen.append)  # type: ignore[arg-type]
    )
    assert (answer.ttft_ms, answer.text, answer.last.text) == (3000.0, "ab", "b")
    assert seen == [3.0]
    assert answer.tiers == {"host"}, "a tier that gave no tokens does not count"
    with pytest.raises(EngineError, match="before it began"):
        asyncio.run(first_token(Engine(), REQUEST))  # type: ignore[arg-type]


def test_the_tiers_above_are_evicted() -> None:
    engine = Engine()
    for tier in ("device", "host", "disk", "remote"):
        asyncio.run(in_tier(engine, tier))
    assert engine.evicted == [["device"], ["device", "host"], ["device", "host", "disk"]]


def test_a_report_keeps_earlier_rows_until_they_are_measured_again(tmp_path: Path) -> None:
    earlier = [{"n": 2, "ms": 1.0}, {"n": 1, "ms": 2.0}]
    report = GrowingReport(
        "speed",
        tmp_path / "new" / "speed.json",
        note="",
        key=("n",),
        earlier=earlier,
        order=lambda row: row["n"],
    )
    report.add({"n": 2, "ms": 3.0}, run="now")
    written = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert written["rows"] == [{"n": 1, "ms": 2.0}, {"n": 2, "ms": 3.0, "run": "now"}]
