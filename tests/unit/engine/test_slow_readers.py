"""A reader slower than the engine, at the time-out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ragserve.api.sse import Pump
from ragserve.config import load
from ragserve.engine.base import GenerateRequest
from ragserve.engine.local import LocalEngine
from ragserve.engine.remote import RemoteEngine
from ragserve.errors import EngineError

CHUNKS = 300  # more than a pump holds
TIMEOUT_S = 100.0


def output(number: int) -> dict[str, Any]:
    return {"text": "x" * number, "meta_info": {"finish_reason": None, "completion_tokens": number}}


class Manager:
    """Streams ``CHUNKS`` pieces at once, and then nothing."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    async def generate_request(self, fields: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        for number in range(1, CHUNKS + 1):
            yield output(number)
        await asyncio.Event().wait()

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


@asynccontextmanager
async def local(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalEngine]:
    manager = Manager()
    monkeypatch.setattr("ragserve.engine.local._manager", lambda: manager)
    yield LocalEngine(load(engine_timeout_s=TIMEOUT_S))


@asynccontextmanager
async def remote(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RemoteEngine]:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(1, CHUNKS + 1):
            yield f"data: {json.dumps(output(number))}\n\n".encode()
        await asyncio.Event().wait()

    async with streaming(pieces(), TIMEOUT_S) as engine:
        yield engine


@asynccontextmanager
async def streaming(pieces: AsyncIterator[bytes], timeout_s: float) -> AsyncIterator[RemoteEngine]:
    """An engine on a server that answers with ``pieces``."""

    async def generate(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        async for piece in pieces:
            await answer.write(piece)
        return answer

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/abort_request", lambda _: web.Response())])
    async with TestServer(app, shutdown_timeout=0) as server:
        engine = RemoteEngine(load(engine_url=str(server.make_url("/")), engine_timeout_s=timeout_s))
        yield engine
        await engine.close()


@pytest.mark.parametrize("make", [local, remote])
def test_a_full_queue_at_the_time_out_ends_the_stream(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out must not strike the task that waits for room in the queue: nobody would end the stream."""

    async def run() -> None:
        async with make(monkeypatch) as engine:
            pump: Pump[Any] = Pump(engine.generate(GenerateRequest("query", [1], "n")))
            while not pump._queue.full():
                await asyncio.sleep(0.01)
            for _ in range(100):  # what has been sent arrives
                await asyncio.sleep(0.001)
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 1.2 * TIMEOUT_S)
            await asyncio.sleep(0.01)
            for _ in range(CHUNKS):
                assert await pump.next() is not None
            with pytest.raises(EngineError, match="No answer within"):
                await pump.next()
            await pump.close()

    asyncio.run(asyncio.wait_for(run(), 240))


def test_a_line_separator_in_an_answer_cuts_no_event() -> None:
    """JSON may contain it as it is, and an engine whose JSON is not escaped sends it so."""
    text = "one\u2028two\x85three"
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 3}
    event = json.dumps({"text": text, "meta_info": meta}, ensure_ascii=False).encode()

    async def pieces() -> AsyncIterator[bytes]:
        sent = b"data: " + event + b"\n\ndata: [DONE]\n\n"
        for at in range(0, len(sent), 5):  # cut anywhere, as a network does
            yield sent[at : at + 5]

    async def run() -> str:
        async with streaming(pieces(), 60) as engine:
            return "".join(
                [chunk.text async for chunk in engine.generate(GenerateRequest("query", [1], "n"))]
            )

    assert asyncio.run(asyncio.wait_for(run(), 240)) == text


def test_a_reader_that_reads_nothing_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from ragserve.api import sse

    monkeypatch.setattr(sse, "STALLED_S", 0.2)
    closed = asyncio.Event()

    async def events() -> AsyncIterator[str]:
        try:
            while True:
                yield "x"
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def run() -> None:
        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        request = SimpleNamespace(receive=receive)
        first, pump = await sse.opened(request, events())  # type: ignore[arg-type]
        stream = sse.EventStream(
            "id",
            first,
            pump,
            encode=lambda event: [event.encode()],
            encode_error=lambda error: b"error",
            end=b"end",
        )
        await stream({}, receive, send)  # type: ignore[arg-type]
        assert closed.is_set()

    asyncio.run(asyncio.wait_for(run(), 240))
