"""Requests of the context benchmark to the engine before each figure; it takes no figure from the
wrong tier.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.bench import auto, context, model_shapes
from ragserve.bench.context import ContextCase, cost_samples
from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import Whereabouts
from ragserve.errors import EngineError
from sglang_ext.wire.protocol import ContextReport, Span


class Engine:
    """Answers at once; its documents sink a tier with each eviction, as the real ones do."""

    def __init__(self, *, sticky: bool = False) -> None:
        self.sticky = sticky
        self.tier = ""
        self.asked: list[tuple[str, str]] = []
        self.info = SimpleNamespace(device="cpu")

    async def ready(self) -> bool:
        return True

    async def warm(self, request: GenerateRequest) -> None:
        assert request.spans[-1].end == len(request.input_ids)
        self.tier = "device"

    async def control(
        self, operation: str, *, tiers: tuple[str, ...] = (), timeout_s: float = 0
    ) -> dict[str, Any]:
        assert operation in ("evict", "flush", "check", "clear")
        if tiers and not self.sticky:
            self.tier = {"device": "host", "host": "disk"}[tiers[-1]]
        return {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        exact = request.strategy in ("full", "prefix")
        self.asked.append((request.strategy, "" if exact else self.tier))
        report = (
            None
            if exact
            else ContextReport(
                request.strategy, 64, 64, 3, {self.tier: 64}, 1.0, 2.0, 3.0, 4.0, recompute_graph=True
            )
        )
        yield GenerateChunk("", EngineUsage(), EngineTimings(queue_ms=5.0), None, report)
        yield GenerateChunk("", EngineUsage(), EngineTimings(), "length", report)


CASES = (
    ContextCase("all", "full", every_size=False),
    ContextCase("some", "concat", {"keep": 0.5}, ("device", "disk")),
    ContextCase("more", "epic", {}, ("device", "host"), every_size=False),
)


def rows(
    engine: Engine, full_ms: dict[int, float], cases: tuple[ContextCase, ...] = CASES
) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [row async for row in context._rows(engine, 64, 16, cases, full_ms, 2)]

    return asyncio.run(collect())


def test_strategies_take_turns_and_start_in_turn_and_each_tier_comes_below_the_one_before() -> None:
    engine, full_ms = Engine(), {}
    found = rows(engine, full_ms)
    first = [("full", ""), ("concat", "device"), ("epic", "device")]
    rounds = [first[by:] + first[:by] for by in (0, 1, 2, 0)]  # two to warm up, two that count
    assert engine.asked[:12] == [each for round_ in rounds for each in round_]
    assert engine.asked[12:] == [("epic", "host")] * 4 + [("concat", "disk")] * 4
    assert [(row["strategy"], row["tier"], row["runs"]) for row in found] == [
        ("all", None, 2),
        ("some", "device", 2),
        ("more", "device", 2),
        ("more", "host", 2),
        ("some", "disk", 2),
    ]
    assert set(full_ms) == {64}
    for row in found[1:]:
        assert (row["kept"], row["recomputed"], row["compose ms"], row["load ms"], row["extend ms"]) == (
            64,
            3,
            1.0,
            2.0,
            4.0,
        )
        assert row["recompute graph"] is True
        assert row["queue ms"] == 3.0, "what the load took is not counted twice"
        assert row["other ms"] == pytest.approx(row["ttft ms"] - 1.0 - 2.0 - 3.0 - 4.0 - 3.0, abs=0.2)
        assert row["fastest ms"] <= row["ttft ms"] <= row["slowest ms"]


def test_documents_are_cached_where_no_case_reads_them_from_the_device_too() -> None:
    cases = (ContextCase("all", "full"), ContextCase("more", "epic", {}, ("host",)))
    found = rows(Engine(), {}, cases)
    assert [(row["strategy"], row["tier"], row.get("error")) for row in found] == [
        ("all", None, None),
        ("more", "host", None),
    ]


def test_slow_cases_run_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "SLOW", ((-1.0, (1, 1)),))
    assert [row["runs"] for row in rows(Engine(), {})] == [1] * 5


def test_documents_from_another_tier_are_an_error_of_their_case_only() -> None:
    found = rows(Engine(sticky=True), {})
    errors = {(row["strategy"], row["tier"]): row.get("error", "") for row in found}
    assert {case for case, error in errors.items() if error} == {("more", "host"), ("some", "disk")}
    assert "should have come from host" in errors["more", "host"]
    assert "should have come from disk" in errors["some", "disk"]


def measure(engine: Engine, monkeypatch: pytest.MonkeyPatch, out: Path, **options: Any) -> dict[str, Any]:
    engine.info = SimpleNamespace(device="cpu", attention_backend="none")
    monkeypatch.setattr(model_shapes, "run_once", lambda settings, work: asyncio.run(work(engine)))
    context.run(out, lengths=(64,), cases=CASES, repeats=1, **options)
    return json.loads((out / "context-embedded.json").read_text())


def test_a_failed_case_ends_the_benchmark_in_failure_after_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"2 cases failed.*should have come from host"):
        measure(Engine(sticky=True), monkeypatch, tmp_path, document_tokens=(16,))
    assert len(json.loads((tmp_path / "context-embedded.json").read_text())["rows"]) == 5


def test_further_sizes_of_documents_have_fewer_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measure(Engine(), monkeypatch, tmp_path, document_tokens=(16, 32))["rows"]
    assert [(row["strategy"], row["tier"]) for row in found if row["document tokens"] == 32] == [
        ("some", "device"),
        ("some", "disk"),
    ]


def test_earlier_rows_stay_unless_they_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = {"context tokens": 64, "document tokens": 16}
    earlier = [
        place | {"strategy": "all", "tier": None, "ttft ms": -1},
        place | {"strategy": "gone", "tier": "host", "ttft ms": -2},
    ]
    (tmp_path / "earlier.json").write_text(json.dumps({"workload": {}, "rows": earlier}))
    found = measure(Engine(), monkeypatch, tmp_path, document_tokens=(16,), merge=tmp_path / "earlier.json")[
        "rows"
    ]
    assert earlier[1] in found
    (again,) = [row for row in found if row["strategy"] == "all"]
    assert again["ttft ms"] >= 0
    assert len(found) == 6


def test_bytes_per_token_of_a_shape() -> None:
    assert model_shapes.kv_bytes_per_token("llama-3.1-8b") == 128 * 1024


class Caching(Engine):
    """All documents on one tier, nothing in the prefix cache."""

    async def where(self, namespace: str, documents: list[list[int]]) -> Whereabouts:
        some = tuple(True for _ in documents)
        return Whereabouts(some, some, ("disk",) * len(documents), "disk", None, 0, 0, 16, 1, {})

    async def prefix(self, namespace: str, input_ids: list[int]) -> int:
        return 0


@pytest.mark.parametrize(("composed_ms", "chosen"), [(20.0, "samkv"), (99.0, "prefix")])
def test_auto_chooses_by_what_the_run_measured(composed_ms: float, chosen: str) -> None:
    measured: list[dict[str, Any]] = []
    for length in (64, 640):
        place = {"context tokens": length, "document tokens": 16}
        measured.append(place | {"strategy": "full", "tier": None, "ttft ms": 100.0 * length / 64})
        measured.append(place | {"strategy": "prefix, question new", "tier": None, "ttft ms": 5.0})
        measured.append(place | {"strategy": "some", "tier": "device", "ttft ms": composed_ms * length / 64})
        measured.append(place | {"strategy": "other", "tier": "device", "ttft ms": 1.0})
        measured.append(place | {"strategy": "some", "tier": "disk", "error": "failed"})
    cases = (
        *context.CASES[:2],
        ContextCase("some", "samkv", {"keep": 0.15}),
        ContextCase("other", "concat"),
    )
    samples = cost_samples(measured, cases)
    assert {(sample.tokens, sample.cached) for sample in samples if not sample.strategy} == {
        (128, 0),
        (128, 96),
        (704, 0),
        (704, 672),
    }
    assert [(sample.strategy, sample.tokens) for sample in samples if sample.strategy] == [
        ("samkv:keep=0.15", 96),
        ("samkv:keep=0.15", 672),
    ]
    engine = Caching()
    strategies = ("full", "prefix", "samkv")
    engine.info = SimpleNamespace(
        device="cpu", fingerprint="f", strategies=strategies, max_prompt_tokens=2**20
    )
    request = GenerateRequest("r", [1] * 96, "n", spans=(Span(0, 32), Span(32, 96)))
    with auto.chooser(engine, samples) as chooser:
        assert asyncio.run(chooser.choose(auto.prompt_of(request, [1] * 32), "n")).spec.name == chosen
