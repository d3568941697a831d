"""Workers that refuse a call for now."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.errors import TooManyRequests
from ragserve.fleet.fleet_engine import FleetEngine
from ragserve.fleet.worker_engine import WorkerEngine
from tests.unit.fleet.fake_worker import FakeWorker
from tests.unit.fleet.test_fleet import document, on


def test_a_worker_whose_queue_is_full_is_not_lost(
    two: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control call that it refuses for now says nothing of its health, and may be sent again."""
    full = TooManyRequests("The engine's queue is full.")

    async def refuse(engine: WorkerEngine, *args: Any, **kwargs: Any) -> Any:
        raise full

    async def work(engine: FleetEngine) -> None:
        pieces = [document(number) for number in range(1, 9)]
        with monkeypatch.context() as patch:
            patch.setattr(WorkerEngine, "control", refuse)
            patch.setattr(WorkerEngine, "where", refuse)
            for call in (engine.control("stat"), engine.where("n", pieces)):
                with pytest.raises(TooManyRequests):
                    await call
            assert [each["state"] for each in engine.workers()] == ["serving", "serving"]
        assert len((await engine.where("n", pieces)).fastest()) == 8

    on(two, work)
