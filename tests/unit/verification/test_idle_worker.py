"""Work in the background: only while no request is being answered, and stopped by one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from ragserve.answering.in_flight import Idleness
from ragserve.verification import idle_worker
from ragserve.verification.idle_worker import IdleWorker
from tests.unit.verification.idle_engine import until


class Source:
    """Pieces that last until ``end`` is set."""

    def __init__(self, *, fails: bool = False) -> None:
        self.begun = self.stopped = self.done = 0
        self.end = asyncio.Event()
        self.fails = fails

    def work(self) -> Coroutine[Any, Any, None] | None:
        return None if self.done else self._piece()

    async def _piece(self) -> None:
        self.begun += 1
        if self.fails:
            self.done = 1
            raise RuntimeError("it broke")
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        self.done = 1


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_worker, "QUIET_S", 0.05)
    monkeypatch.setattr(idle_worker, "_POLL_S", 0.01)
    monkeypatch.setattr(idle_worker, "_AFTER_ERROR_S", 0.01)


def test_a_request_stops_the_work_which_goes_on_after_it() -> None:
    async def run() -> None:
        idleness, source = Idleness(), Source()
        async with IdleWorker(idleness, [source.work]).running():
            await until(lambda: source.begun == 1, "begun")
            with idleness.request():
                await until(lambda: source.stopped == 1, "stopped")
                await asyncio.sleep(0.2)
                assert source.begun == 1, "while a request is being answered nothing begins"
                with idleness.request():
                    pass
                assert idleness.idle_s == 0.0, "the other one is not done"
            await until(lambda: source.begun == 2, "begun again")
            source.end.set()
            await until(lambda: source.done == 1, "done")
        assert source.stopped == 1

    asyncio.run(run())


def test_the_first_source_comes_first_and_a_failure_stops_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> tuple[Source, Source]:
        first, second = Source(fails=True), Source()
        second.end.set()
        async with IdleWorker(Idleness(), [first.work, second.work]).running():
            await until(lambda: second.done == 1, "done")
        return first, second

    first, second = asyncio.run(run())
    assert (first.begun, second.begun) == (1, 1)
    assert "it broke" in caplog.text


def test_the_end_of_the_server_stops_the_work() -> None:
    async def run() -> Source:
        source = Source()
        async with IdleWorker(Idleness(), [source.work]).running():
            await until(lambda: source.begun == 1, "begun")
        return source

    assert asyncio.run(run()).stopped == 1
