"""Replies of the control channel reach the callers that they are for, whoever leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.config import load
from ragserve.engine.base import GenerateRequest
from ragserve.engine.local import LocalEngine
from sglang_ext.wire.protocol import Span


def test_a_pending_operation_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def dumper_control(request: Any) -> list[Any]:
        asked.append(request.body)
        found = {"pending": 3} if len(asked) < 3 else {"pages": 5}
        return [SimpleNamespace(success=True, response=[found], error="")]

    monkeypatch.setattr(
        "ragserve.engine.local._manager", lambda: SimpleNamespace(dumper_control=dumper_control)
    )
    assert asyncio.run(LocalEngine(load()).control("verify")) == {"pages": 5}
    assert asked == [{"op": "verify"}, {"op": "verify", "pending": 3}, {"op": "verify", "pending": 3}]


def test_a_short_operation_is_asked_for_soon_and_a_long_one_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    waits: list[float] = []
    sleep = asyncio.sleep

    async def dumper_control(request: Any) -> list[Any]:
        asked.append(request)
        found = {"pending": 1} if len(asked) <= 10 else {}
        return [SimpleNamespace(success=True, response=[found], error="")]

    async def slept(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    manager = SimpleNamespace(dumper_control=dumper_control)
    monkeypatch.setattr("ragserve.engine.local._manager", lambda: manager)
    monkeypatch.setattr("ragserve.engine.local.asyncio.sleep", slept)
    assert asyncio.run(LocalEngine(load()).control("verify")) == {}
    assert waits == sorted(waits)
    assert waits[0] < 0.005
    assert waits[-1] == 0.05


def test_a_removal_is_one_of_what_waits_for_its_analysis_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dumper_control(request: Any) -> list[Any]:
        return [SimpleNamespace(success=True, response=[{"analyses": {}}], error="")]

    monkeypatch.setattr(
        "ragserve.engine.local._manager", lambda: SimpleNamespace(dumper_control=dumper_control)
    )

    async def work() -> None:
        engine = LocalEngine(load())
        engine._documents._later.begin()  # nothing is analysed meanwhile
        asked = GenerateRequest("q", [1, 2, 3], "n", spans=(Span(0, 1), Span(1, 2)))
        for forgotten in ([[2]], None):
            engine._documents._later.add(asked, [1])
            assert await engine.control("stat") == {"analyses": {"waiting": 1}}
            await engine.forget("n", forgotten)
            assert await engine.control("stat") == {"analyses": {"waiting": 0}}
        await engine._documents.close()

    asyncio.run(work())


@pytest.mark.parametrize("stuck", [False, True])
def test_the_write_queue_is_flushed_at_the_end(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    """An engine that never answers holds nobody."""
    asked: list[str] = []

    async def dumper_control(request: Any) -> list[Any]:
        asked.append(request.body["op"])
        if stuck:
            await asyncio.Event().wait()
        found = {} if len(asked) == 3 else {"pending": 1}
        return [SimpleNamespace(success=True, response=[found], error="")]

    manager = SimpleNamespace(dumper_control=dumper_control)
    monkeypatch.setattr("ragserve.engine.local._manager", lambda: manager)
    monkeypatch.setattr("ragserve.engine.local._FLUSH_S", 0.2 if stuck else 30)
    engine = LocalEngine(load())
    monkeypatch.setattr(engine, "_info", object())  # it has started
    asyncio.run(asyncio.wait_for(engine.close(), 240))
    assert asked == ["flush"] * (1 if stuck else 3)


def test_a_caller_that_leaves_takes_its_reply_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own communicator hands each reply to the caller that waits, in order."""
    from sglang.srt.managers.communicator import FanOutCommunicator

    sent: list[Any] = []
    communicator: Any = FanOutCommunicator(sent.append, fan_out=1)
    monkeypatch.setattr(
        "ragserve.engine.local._manager", lambda: SimpleNamespace(dumper_control=communicator)
    )
    engine = LocalEngine(load())

    async def reply() -> None:
        """Answer the oldest request with its own operation."""
        while not sent:
            await asyncio.sleep(0)
        response = SimpleNamespace(success=True, response=[{"op": sent.pop(0).body["op"]}], error="")
        communicator.handle_recv(response)

    async def run() -> None:
        callers = [asyncio.create_task(engine.control(name)) for name in ("a", "b", "c")]
        while not sent:
            await asyncio.sleep(0)
        callers[0].cancel()
        for _ in callers:
            await reply()
        assert [(await caller)["op"] for caller in callers[1:]] == ["b", "c"]
        with pytest.raises(asyncio.CancelledError):
            await callers[0]

    asyncio.run(asyncio.wait_for(run(), 240))
