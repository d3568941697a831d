"""Costs that several measure: each leaves what the others have written meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from ragserve.commands import calibrate
from ragserve.config import Settings
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.profiles import gate
from ragserve.profiles.costs import COSTS, FILE_NAME, CostSample, fit
from ragserve.retrieval import embedder
from ragserve.strategy_spec import parse
from ragserve.verification.calibration.tune_worker import TuneJob, _tune
from ragserve.verification.costs import CostSchedule
from ragserve_index import IndexStore
from tests.conftest import MODEL
from tests.unit.verification.idle_engine import FINGERPRINT, IdleEngine, entry, fill


class Shared(IdleEngine):
    """While its costs are measured, another process writes those of `epic`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._place = folder / FILE_NAME

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.rid == "calibrate" and not self._place.exists():
            samples = [CostSample(tokens, float(tokens)) for tokens in (256, 512, 1024)]
            samples += [CostSample(tokens, 9.0, strategy="epic", tier="device") for tokens in (256, 512)]
            COSTS.save(self._place, FINGERPRINT, fit(samples, model="m", hardware="", date="d"))
        async for chunk in super().generate(request):
            yield chunk


class Vectors:
    """Stands where the embedder does."""

    name = "words"

    @classmethod
    def of(cls, settings: Settings) -> Vectors:
        return cls()

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        return np.tile(np.asarray([1.0, 0.0, 0.0, 0.0], dtype=np.float32), (len(texts), 1))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a data folder where `concat` is verified."""
    gate.record(tmp_path / gate.FILE_NAME, FINGERPRINT, {"concat": entry()})
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 3)
    return Settings(data_dir=tmp_path, model=str(MODEL), top_k=2)


def priced(settings: Settings) -> list[str]:
    found = COSTS.load(settings.data_dir / FILE_NAME, FINGERPRINT)
    assert found is not None
    return sorted(found.composed)


def test_tune_leaves_what_another_has_measured_meanwhile(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    folder, now = str(settings.data_dir), time.time()
    job = TuneJob("notes", ["concat"], folder, f"{folder}/tune", now, now + 1e6, 1, at_once=1)
    asyncio.run(_tune(job, settings, parse("concat"), Shared(settings.data_dir), lambda *_: None))
    assert priced(settings) == ["concat", "epic"]


@pytest.mark.parametrize("given", ["concat", ""])
def test_calibrate_leaves_the_costs_of_other_strategies(settings: Settings, given: str) -> None:
    schedule = CostSchedule(max_tokens=1024, repeats=1)
    specs = parse(given) if given else []
    engine = Shared(settings.data_dir)
    asyncio.run(calibrate._costs(settings, engine, specs, schedule, new_profile=False))
    assert priced(settings) == ["concat", "epic"]
