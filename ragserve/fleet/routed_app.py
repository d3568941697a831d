"""A worker behind a router: it refuses what was meant for another, and answers questions about the way."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve.errors import RagserveError
from ragserve.fleet.routing_key import ASK, MARK, PROBE, ROUTING_KEY, WORKER, meant_for

HOLD_S = 10.0
"""Seconds that a probe's answer stays open for its reader to leave."""

_PROBES = 64  # whose end is remembered


class Misdirected(RagserveError, status=421, code="misdirected"):
    """A router has brought a request to another worker than its key is for."""


class RoutedApp:
    """ASGI app in front of SGLang's. Requests without a routing key pass.

    ``name`` gives the worker's own."""

    def __init__(self, app: ASGIApp, name: Callable[[], str]) -> None:
        self._app = app
        self._name = name
        self._left: OrderedDict[str, asyncio.Future[bool]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        key, mark = headers.get(ROUTING_KEY), headers.get(MARK, "")
        if key is None:
            await self._app(scope, receive, send)
        elif mark == ASK:
            await JSONResponse({"worker": self._name()})(scope, receive, send)
        elif meant_for(key) != self._name():
            raise Misdirected("This request is for another worker.", hint="Ask for a new routing key.")
        elif mark.startswith(PROBE):
            await self._probe(mark.removeprefix(PROBE), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def left(self, probe: str) -> bool:
        """Return whether the reader of a probe's answer has left before its end, once it has ended."""
        ended = self._left.get(probe)
        return False if ended is None else await asyncio.shield(ended)

    async def _probe(self, probe: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream what has arrived, and keep the stream open until its reader leaves."""
        ended = self._left[probe] = asyncio.get_running_loop().create_future()
        while len(self._left) > _PROBES:
            self._left.popitem(last=False)
        left = False
        try:
            body = await Request(scope, receive).body()
            event = b"data: " + json.dumps({"received": body.decode("utf-8", "replace")}).encode() + b"\n\n"
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": event, "more_body": True})
            left = await _leaves(receive)
            if not left:
                await send({"type": "http.response.body", "body": b""})
        finally:
            ended.set_result(left)


async def _leaves(receive: Receive) -> bool:
    """Wait until the reader of an answer leaves. False if it has not within `HOLD_S`."""
    try:
        async with asyncio.timeout(HOLD_S):
            while (await receive())["type"] != "http.disconnect":
                continue
    except TimeoutError:
        return False
    return True


class NamedAnswers:
    """Middleware that names the worker in all answers to requests that a router has brought: an answer
    without a name is the router's own."""

    def __init__(self, app: ASGIApp, name: Callable[[], str]) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or ROUTING_KEY not in Headers(scope=scope):
            await self._app(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (WORKER.encode("latin-1"), self._name().encode("latin-1"))
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        await self._app(scope, receive, send_named)
