"""A worker whose data folder is served at another address of the list."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ragserve.fleet.fleet_engine import FleetEngine
from tests.unit.fleet.fake_worker import FakeWorker, workers
from tests.unit.fleet.test_fleet import on, until


def test_it_serves_there_once_the_address_from_before_is_dead(tmp_path: Path) -> None:
    with workers(tmp_path, 2) as made:
        moved = FakeWorker(made[1].ledger.data_dir)
        moved.start()  # which gives it its address
        moved.stop()

        async def work(engine: FleetEngine) -> list[str]:
            await asyncio.to_thread(made[1].kill)
            await asyncio.to_thread(moved.start)
            await until(engine, 2, "serving")
            return [one["state"] for one in engine.workers()]

        try:
            assert on([*made, moved], work) == ["serving", "lost", "serving"]
        finally:
            moved.stop()
