"""What the context benchmark asks of the engine before each figure, and that it takes no figure from the wrong tier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
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
        self.info = SimpleNamespace(device="cpu")

    async def warm(self, request: GenerateRequest) -> None:
        assert request.spans[-1].end == len(request.input_ids)
        self.tier = "device"

    async def control(self, operation: str, *, tiers: tuple[str, ...] = (), timeout_s: float = 0) -> dict[str, Any]:
        assert operation in ("evict", "flush", "check", "clear")
        if tiers and not self.sticky:
            self.tier = {"device": "host", "host": "disk"}[tiers[-1]]
        return {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        exact = request.strategy in ("full", "prefix")
        self.asked.append((request.strategy, "" if exact else self.tier))
        report = None if exact else ContextReport(request.strategy, 64, 64, 3, {self.tier: 64}, 1.0, 2.0, 3.0, 4.0)
        yield GenerateChunk("", EngineUsage(), EngineTimings(queue_ms=5.0), None, report)
        yield GenerateChunk("", EngineUsage(), EngineTimings(), "length", report)


CASES = (
    Case("all", "full", early=True),
    Case("some", "concat", {"keep": 0.5}, ("device", "disk"), early=True, every_size=True),
    Case("more", "epic", {}, ("device", "host")),
)


def rows(engine: Engine, full_ms: dict[int, float], *, first_size: bool = True) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        parts = context._order(CASES, first_size=first_size)
        return [row for part in parts async for row in context._rows(engine, 64, 16, part, full_ms, 2)]

    return asyncio.run(collect())


def test_what_matters_most_is_measured_first_and_the_disk_last_after_warm_ups() -> None:
    engine, full_ms = Engine(), {}
    found = rows(engine, full_ms)
    wanted = [("full", ""), ("concat", "device"), ("epic", "device"), ("epic", "host"), ("concat", "disk")]
    assert engine.asked == [each for each in wanted for _ in range(context.WARM_UPS + 2)]
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
        assert row["fastest ms"] <= row["ttft ms"] <= row["slowest ms"]


def test_further_sizes_of_documents_have_fewer_cases() -> None:
    found = rows(Engine(), {64: 100.0}, first_size=False)
    assert [(row["strategy"], row["tier"]) for row in found] == [("some", "device")]


def test_documents_from_another_tier_are_an_error_of_their_case_only() -> None:
    found = rows(Engine(sticky=True), {})
    errors = {(row["strategy"], row["tier"]): row.get("error", "") for row in found}
    assert {case for case, error in errors.items() if error} == {("more", "host"), ("some", "disk")}
    assert "should have come from host" in errors["more", "host"]
    assert "should have come from disk" in errors["some", "disk"]


def test_a_failed_case_ends_the_benchmark_in_failure_after_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine(sticky=True)
    engine.info = SimpleNamespace(device="cpu", attention_backend="none")
    monkeypatch.setattr(context, "run_once", lambda settings, work: asyncio.run(work(engine)))
    with pytest.raises(EngineError, match=r"2 cases failed.*should have come from host"):
        context.run(tmp_path, lengths=(64,), document_tokens=(16,), cases=CASES, repeats=1)
    assert len(json.loads((tmp_path / "context-embedded.json").read_text())["rows"]) == 5


def test_bytes_per_token_of_a_shape() -> None:
    assert in_process.kv_bytes_per_token("llama-3.1-8b") == 128 * 1024
