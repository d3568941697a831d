"""From which length on sparse decoding pays: on made-up machines, with a clock that they turn themselves."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.server_args import server_args
from ragserve.errors import EngineError, InvalidRequest
from ragserve.profiles.decode import DECODE, FILE_NAME, DecodeProfile, Point, crossover, options_of
from ragserve.verification.calibration.decode import enough, find_and_save, lengths, measure
from ragserve.verification.engine_run import decode_step
from sglang_ext.documents.fingerprint import model_fingerprint
from sglang_ext.wire.protocol import ATTENTION_CONFIG_VARIABLE
from tests.conftest import MODEL

OPTIONS = {"mode": "hierarchical", "budget": 512, "reuse": 16, "scores": "exact"}


def points(*rows: tuple[int, float, float]) -> list[Point]:
    return [Point(*row) for row in rows]


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        (points((1000, 10, 12), (2000, 20, 12), (4000, 40, 12)), 1000 + round(1000 * 2.5 / 9.5)),
        (points((4000, 40, 12), (1000, 10, 12), (2000, 20, 12)), 1000 + round(1000 * 2.5 / 9.5)),
        (points((1000, 10, 5), (2000, 20, 5)), 1000),
        (points((1000, 10, 12), (2000, 20, 19.5)), 2000),
        (points((1000, 10, 5), (2000, 20, 30), (4000, 40, 20)), 2000 + round(2000 * 11 / 29)),
    ],
    ids=["between", "any order", "always", "never by enough", "lost in between"],
)
def test_sparse_pays_where_all_longer_contexts_gain(measured: list[Point], found: int) -> None:
    assert crossover(measured) == found


def test_lengths_double_up_to_the_longest() -> None:
    assert lengths(0, 5000) == [1024, 2048, 4096, 5000]
    assert lengths(4096, 8192) == [4096, 8192]
    with pytest.raises(InvalidRequest, match="1000 tokens are too short"):
        lengths(0, 1000)
    with pytest.raises(InvalidRequest, match="lower --decode-budget"):
        lengths(8192, 8000)


class Machine:
    """An engine whose dense step takes a millisecond per 1,000 tokens of context and whose sparse one takes
    3; turns the clock.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.info = EngineInfo(
            "local", "m", "t", "v", "cpu", "a", 20_000, 40_000, ("full",), sparse_decode=True
        )
        self.cached: set[tuple[int, ...]] = set()
        self.forgotten = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        cold = tuple(request.input_ids) not in self.cached
        self.cached.add(tuple(request.input_ids))
        assert not (cold and request.decode), "what is timed must have been prefilled"
        step = 0.003 if request.decode.get("mode") == "hierarchical" else len(request.input_ids) / 1e6
        started = self.now
        for i in range(1, request.sampling.max_new_tokens + 1):
            await asyncio.sleep(0)
            self.now = max(self.now, started + i * step)  # requests of a batch share their steps
            yield GenerateChunk("x", EngineUsage(len(request.input_ids), 0, i), EngineTimings())

    async def forget(self, namespace: str, documents: Any) -> None:
        self.forgotten += 1
        self.cached.clear()


def test_steps_are_timed_over_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, lines = Machine(), []
    monkeypatch.setattr(
        "ragserve.verification.calibration.decode.decode_step",
        lambda *a, **k: decode_step(*a, **k, clock=lambda: machine.now),
    )
    found = asyncio.run(measure(machine, OPTIONS, batch=2, max_tokens=6000, tokens=12, report=lines.append))  # type: ignore[arg-type]
    assert [point.tokens for point in found] == [1024, 2048, 4096, 6000]
    assert [point.dense_ms for point in found] == pytest.approx([1.024, 2.048, 4.096, 6.0])
    assert [point.sparse_ms for point in found] == pytest.approx([3.0] * 4)
    assert 2048 < crossover(found) < 4096
    assert len(lines) == machine.forgotten == 4


def test_the_profile_is_saved_and_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine: Any = Machine()
    monkeypatch.setattr(
        "ragserve.verification.calibration.decode.decode_step",
        lambda *a, **k: decode_step(*a, **k, clock=lambda: machine.now),
    )
    settings = Settings(data_dir=tmp_path, model=str(MODEL), decode_budget=512)
    assert (enough(settings, 100), enough(settings, 5000)) == (2048, 10_000)
    save = partial(find_and_save, settings, machine, tokens=12, max_tokens=6000, report=lambda line: None)
    found = asyncio.run(save(time_left=lambda: False))
    assert [point.tokens for point in found.points] == [1024, 2048], "two lengths show a crossover"
    assert DECODE.load(tmp_path / FILE_NAME, machine.info.fingerprint) == found
    assert (found.options, found.dense_below) == (OPTIONS, 2048)
    assert [point.tokens for point in asyncio.run(save()).points] == [1024, 2048, 4096, 6000]


def test_requests_that_decode_one_after_another_are_not_timed() -> None:
    machine = Machine()

    async def run() -> None:
        for ids in ([1] * 100, [2] * 100):
            async for _ in machine.generate(GenerateRequest("a", ids, "n")):
                pass
        await decode_step(machine, [[1] * 100, [2] * 100], {"mode": "dense"}, tokens=12, clock=lambda: 0.0)  # type: ignore[arg-type]

    with pytest.raises(EngineError, match="did not decode at the same time"):
        asyncio.run(run())


def test_what_decides_the_cost_is_remembered() -> None:
    assert options_of(Settings(decode_budget=512, decode_observe="last")) == OPTIONS
    for others in ({"decode_scores": "bound"}, {"kv_bits": 8, "sparse_attention": "on"}):
        assert options_of(Settings(decode_budget=512, **others)) == OPTIONS | {"scores": "bound"}
    assert options_of(Settings(decode_mode="progressive")) == {"mode": "progressive", "threshold": 0.95}
    with pytest.raises(InvalidRequest, match="no length to calibrate"):
        options_of(Settings(decode_mode="dense"))


def test_the_server_is_dense_up_to_the_length_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dense_below(**flags: Any) -> int:
        monkeypatch.setenv(ATTENTION_CONFIG_VARIABLE, "")
        server_args(
            Settings(
                data_dir=tmp_path,
                model=str(MODEL),
                sparse_attention="on",
                decode_budget=512,
                max_total_tokens=4096,
                **flags,
            )
        )
        return int(json.loads(os.environ[ATTENTION_CONFIG_VARIABLE])["options"]["dense_below"])

    assert dense_below() == 8192, "nothing is known yet"
    profile = DecodeProfile(3000, OPTIONS, 4, tuple(points((1024, 1, 3), (4096, 4, 3))), "m", "h", "d")
    DECODE.save(tmp_path / FILE_NAME, model_fingerprint(str(MODEL), ""), profile)
    DECODE.save(tmp_path / FILE_NAME, "another model", profile)
    assert DECODE.load(tmp_path / FILE_NAME, "another model") == profile
    assert DECODE.load(tmp_path / FILE_NAME, "a third") is None
    assert dense_below() == 3000
    assert dense_below(decode_dense_below=700) == 700, "the setting has the last word"
    assert dense_below(decode_reuse=1) == 8192, "calibrated for other settings"
    assert dense_below(decode_observe="last", decode_window=4) == 3000
    options = json.loads(os.environ[ATTENTION_CONFIG_VARIABLE])["options"]
    assert (options["observe"], options["window"], options["scores"]) == ("last", 4, "auto")
    assert dense_below(decode_mode="dense") == 8192
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(InvalidRequest, match="ragserve calibrate --part decode"):
        dense_below()
