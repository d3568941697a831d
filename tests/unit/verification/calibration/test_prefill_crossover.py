"""From which prompt length on prefill is sparse: measured on a made-up engine, used by the server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL, Settings
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.server_args import server_args
from ragserve.errors import InvalidRequest
from ragserve.profiles.prefill_crossover import (
    FILE_NAME,
    PREFILL,
    PrefillPoint,
    PrefillProfile,
    on_from,
    options_of,
)
from ragserve.verification.calibration.prefill_times import measure
from ragserve.verification.engine_run import first_token
from sglang_ext.documents.fingerprint import model_fingerprint
from sglang_ext.wire.protocol import ATTENTION_CONFIG_VARIABLE, PrefillReport
from tests.conftest import MODEL

OPTIONS = {"mode": "vertical_slash", "alpha": 0.955, "dense_last": 256, "observe": 64}


def points(*rows: tuple[int, float, float]) -> tuple[PrefillPoint, ...]:
    return tuple(PrefillPoint(*row, 0.4) for row in rows)


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        (points((2000, 10, 12), (4000, 20, 12)), 2000 + round(2000 * 2.5 / 9.5)),
        (points((4000, 20, 12), (2000, 10, 8)), 2000),
        (points((2000, 10, 8), (4000, 20, 19.5)), None),
        (points((2000, 10, 30)), None),
    ],
    ids=["between", "always, any order", "not at the longest", "never"],
)
def test_sparse_prefill_is_on_where_it_gains_at_all_longer_prompts(
    measured: tuple[PrefillPoint, ...], found: int | None
) -> None:
    assert on_from(measured) == found


class PrefillMachine:
    """An engine whose dense prefill takes a millisecond per 1,000 pairs of tokens, and whose sparse one half
    of it and a second; turns the clock."""

    def __init__(self, context: int = 6000) -> None:
        self.now = 0.0
        self.info = EngineInfo(
            "local", "m", "t", "v", "cpu", "a", context, 40_000, ("full",), sparse_prefill=True
        )
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        n, report = len(request.input_ids), None
        took = n * n / 1e6
        if request.prefill["mode"] != "dense":
            took = took / 2 + 1.0
            report = PrefillReport("vertical_slash", 0.955, n, 0.5)
        await asyncio.sleep(0)
        self.now += took
        yield GenerateChunk("x", EngineUsage(n, 0, 1), EngineTimings(), prefill=report)


def measured(machine: PrefillMachine, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[PrefillPoint]:
    monkeypatch.setattr(
        "ragserve.verification.calibration.prefill_times.first_token",
        lambda *a, **k: first_token(*a, **k, clock=lambda: machine.now),
    )
    given: dict[str, Any] = {"max_tokens": 5000, "repeats": 1, "report": lambda line: None} | more
    builder = PromptBuilder.load(DEFAULT_MODEL)
    return asyncio.run(measure(machine, builder, OPTIONS, **given))  # type: ignore[arg-type]


def test_dense_and_sparse_prefill_are_timed_over_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = PrefillMachine()
    found = measured(machine, monkeypatch)
    assert [point.tokens for point in found] == [2048, 4096, 5000]
    assert [point.dense_ms for point in found] == pytest.approx([4194.3, 16777.2, 25000.0], rel=1e-4)
    assert [point.sparse_ms for point in found] == pytest.approx([3097.15, 9388.6, 13500.0], rel=1e-4)
    assert {point.share for point in found} == {0.5}
    assert on_from(found) == 2048
    assert {request.strategy for request in machine.asked} == {"full"}, "nothing may be cached"
    assert machine.asked[1].prefill == {**OPTIONS, "dense_below": 0}
    ids = machine.asked[-1].input_ids
    assert len(set(map(tuple, (ids[i : i + 50] for i in range(0, 4950, 50))))) == 99, "no text comes twice"


def test_short_prompts_and_engines_without_sparse_prefill_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidRequest, match="Prompts of 1000 tokens are too short"):
        measured(PrefillMachine(), monkeypatch, max_tokens=1000)
    plain = PrefillMachine()
    plain.info = EngineInfo("local", "m", "t", "v", "cpu", "a", 6000, 40_000, ("full",))
    with pytest.raises(InvalidRequest, match="has no sparse prefill"):
        measured(plain, monkeypatch)


def test_the_server_prefills_densely_up_to_the_length_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dense_below(**flags: Any) -> int | None:
        monkeypatch.setenv(ATTENTION_CONFIG_VARIABLE, "")
        fixed: dict[str, Any] = {"model": str(MODEL), "sparse_attention": "on", "max_total_tokens": 4096}
        server_args(Settings(data_dir=tmp_path, **fixed, **flags))
        found: int | None = json.loads(os.environ[ATTENTION_CONFIG_VARIABLE])["prefill"]["dense_below"]
        return found

    def save(found: int | None) -> None:
        profile = PrefillProfile(found, OPTIONS, points((2048, 10, 5)), "m", "h", "d")
        PREFILL.save(tmp_path / FILE_NAME, model_fingerprint(str(MODEL), ""), profile)

    assert options_of(Settings()) == OPTIONS
    blocks = Settings(prefill_mode="block_sparse", sparse_attention="on")
    assert options_of(blocks) == {"mode": "block_sparse", "alpha": 0.955, "dense_last": 256}
    assert dense_below() is None
    assert "sparse prefill is off" not in caplog.text
    assert dense_below(prefill_mode="vertical_slash") is None
    assert "sparse prefill is off: it is not known" in caplog.text
    caplog.clear()
    save(3000)
    assert dense_below(prefill_mode="vertical_slash") == dense_below() == 3000
    assert dense_below(prefill_mode="vertical_slash", prefill_dense_below=7) == 7, (
        "the setting has the last word"
    )
    assert dense_below(prefill_alpha=0.9) is None
    assert "sparse prefill is off" not in caplog.text
    assert dense_below(prefill_mode="block_sparse") is None
    assert "run ragserve calibrate --part prefill again" in caplog.text
    save(None)
    assert dense_below(prefill_mode="vertical_slash") is None
    assert "sparse prefill is off: it was slower at the longest prompt measured, 2048" in caplog.text
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(InvalidRequest, match="ragserve calibrate --part prefill"):
        dense_below()
