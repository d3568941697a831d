"""Long answers: read by one task, streamed as server-sent events, aborted when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from fastapi import Request
from fastapi.sse import KEEPALIVE_COMMENT
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragserve.api.errors import as_error
from ragserve.disconnects import cancel, left, until_left
from ragserve.errors import RagserveError

T = TypeVar("T")
_END = object()
# A slow reader delays at most this many events before the engine's stream is no longer read.
_QUEUED_EVENTS = 256
KEEPALIVE_S = 15.0
STALLED_S = 60.0  # a client that reads nothing for so long has left


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``. If the client leaves first, cancel it, await its clean-up and raise ClientDisconnect.

    The request's body must have been read."""
    return await until_left(request.receive, work)


class Pump(Generic[T]):
    """Reads a stream of events in a task of its own: cancellation and time-outs bind to the reader."""

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events = events
        self._queue: asyncio.Queue[Any] = asyncio.Queue(_QUEUED_EVENTS)
        self._task = asyncio.create_task(self._run())

    async def next(self) -> T | None:
        """Return the next event, or None after the last. Raises the stream's error."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return None if item is _END else item

    async def close(self) -> None:
        """Stop reading, and wait for the stream's clean-up."""
        await cancel(self._task)

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
    """Return the first event and a pump for the others. No status is sent before, so errors set their own."""
    pump = Pump(events)
    try:
        return await until_disconnect(request, pump.next()), pump
    except BaseException:
        await pump.close()
        raise


class EventStream(Response, Generic[T]):
    """Writes ``first`` and the pump's events; comments keep proxies from closing an idle connection."""

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
        self.headers.update({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._request_id = request_id
        self._first = first
        self._pump = pump
        self._encode = encode
        self._encode_error = encode_error
        self._end = end
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            event = self._first
            while event is not None:
                await _write(send, b"".join(self._encode(event)))
                event = await self._next(send, gone)
            await _write(send, self._end)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the status is out: the stream reports the error
            with contextlib.suppress(ClientDisconnect):
                await _write(send, self._encode_error(as_error(error, self._request_id)))
        finally:
            await cancel(gone)
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
                    raise ClientDisconnect
                if not following.done():
                    await _write(send, KEEPALIVE_COMMENT)
            return following.result()
        finally:
            await cancel(following)


async def _write(send: Send, data: bytes) -> None:
    """Send a piece. Raises ClientDisconnect for a client that reads nothing, which keeps its query's slot."""
    try:
        async with asyncio.timeout(STALLED_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        raise ClientDisconnect from None
