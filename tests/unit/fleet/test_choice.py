"""The choice of a worker while requests run."""

from __future__ import annotations

import asyncio
from typing import Any

from ragserve.fleet.fleet_engine import FleetEngine
from tests.unit.fleet.fake_worker import FakeWorker
from tests.unit.fleet.test_fleet import SYSTEM, document, on, request, text_of


def test_requests_that_come_before_a_first_token_follow_the_one_that_has_their_documents(
    two: list[FakeWorker],
) -> None:
    """The first one's documents are not there yet; those of the others are on their way with it."""

    async def work(engine: FleetEngine) -> None:
        def answering_one(numbers: range) -> str:
            found: Any = engine.answering("n", [SYSTEM, *map(document, numbers)])
            return str(found.url)

        for each in two:
            each.ledger.before_first.clear()
        answer = asyncio.create_task(text_of(engine, request(*range(1, 9), strategy="prefix")))
        async with asyncio.timeout(240):
            while not sum(each["in_flight"] for each in engine.workers()):
                await asyncio.sleep(0.01)
        busy, idle = sorted(engine.workers(), key=lambda each: -each["in_flight"])
        assert answering_one(range(1, 9)) == busy["url"]
        assert answering_one(range(11, 19)) == idle["url"], "others need not wait"
        for each in two:
            each.ledger.before_first.set()
        await answer

    on(two, work)
