"""Answers that take a while: read by one task, streamed as server-sent events, given up as soon as the client
is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from fastapi import Request
from fastapi.sse import KEEPALIVE_COMMENT
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragserve.api.errors import as_error
from ragserve.errors import RagserveError

T = TypeVar("T")
_END = object()
# A slow reader holds at most this many events back from the engine's stream.
_QUEUED_EVENTS = 256
KEEPALIVE_S = 15.0


class ClientGone(ClientDisconnect):
    """The client closed the connection before its answer was complete."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; raises ClientGone, with ``work`` cancelled and its clean-up done, when the
    client leaves first.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, gone)


class Pump(Generic[T]):
    """Reads a stream of events to its end in one task of its own, because cancellation and time-outs belong
    to the task that reads.
    """

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events = events
        self._queue: asyncio.Queue[Any] = asyncio.Queue(_QUEUED_EVENTS)
        self._task = asyncio.create_task(self._run())

    async def next(self) -> T | None:
        """The next event, or None after the last. Raises what the stream raised."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return None if item is _END else item

    async def close(self) -> None:
        """Stop reading; returns when the stream has cleaned up."""
        await _cancel(self._task)

    async def _run(self) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._queue.put(event)
        except Exception as error:  # noqa: BLE001 - handed to the reader
            await self._queue.put(error)
        else:
            await self._queue.put(_END)


async def opened(request: Request, events: AsyncGenerator[T, None]) -> tuple[T | None, Pump[T]]:
    """The first event, awaited before any status goes out so that a bad request gets its own, and what reads
    the others.
    """
    pump = Pump(events)
    try:
        return await until_disconnect(request, pump.next()), pump
    except BaseException:
        await pump.close()
        raise


class EventStream(Response, Generic[T]):
    """Writes ``first`` and what follows it in the pump; comments keep proxies from closing an idle
    connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        first: T | None,
        pump: Pump[T],
        *,
        encode: Callable[[T], Iterable[bytes]],
        encode_error: Callable[[RagserveError], bytes],
        end: bytes,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-store"
        self.headers["X-Accel-Buffering"] = "no"
        self._request_id = request_id
        self._first = first
        self._pump = pump
        self._encode = encode
        self._encode_error = encode_error
        self._end = end
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            event = self._first
            while event is not None:
                await _write(send, b"".join(self._encode(event)))
                event = await self._next(send, gone)
            await _write(send, self._end)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - the status is out: the stream itself says what happened
            await _write(send, self._encode_error(as_error(error, self._request_id)))
        finally:
            await _cancel(gone)
            await self._pump.close()
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, send: Send, gone: asyncio.Task[None]) -> T | None:
        following = asyncio.create_task(self._pump.next())
        try:
            while not following.done():
                await asyncio.wait(
                    {following, gone}, timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    raise ClientGone
                if not following.done():
                    await _write(send, KEEPALIVE_COMMENT)
            return following.result()
        finally:
            await _cancel(following)


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait for the clean-up; what a task raised has been read, or no longer matters to anyone."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    for task in tasks:
        if not task.cancelled():
            task.exception()
