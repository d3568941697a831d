"""Middleware for all requests, ours and SGLang's: request id, body size.

Plain ASGI, to keep streams."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve.answering.in_flight import Idleness
from ragserve.api import errors
from ragserve.api.body import drain
from ragserve.errors import RagserveError, RequestTimeout, TooLarge
from ragserve.logs import ACCESS, REQUEST_ID
from ragserve.metrics import metrics

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestContext:
    """Gives each request an id (a client's valid ``X-Request-Id``), counts it, answers uncaught errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        status = 0
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # it left while sending its body
        except Exception as error:
            if status:  # too late for another answer: the server cuts the connection
                raise
            await errors.response(errors.as_error(error, request_id), request_id)(
                scope, receive, send_with_id
            )
        finally:
            # our routes by template, SGLang's under one label: clients cannot create label values
            route = getattr(scope.get("route"), "path", "upstream")
            metrics().requests.labels(route, str(status or 499)).inc()
            if ACCESS.isEnabledFor(logging.INFO):
                took = round((time.perf_counter() - began) * 1e3, 1)
                line = {
                    "method": scope["method"],
                    "route": route,
                    "status": status or 499,
                    "milliseconds": took,
                }
                ACCESS.info("%s %s", scope["method"], route, extra=line)


class NoteRequests:
    """Lets the server's own work in the background know of every request that may need the engine: all but
    reads (GET, HEAD)."""

    def __init__(self, app: ASGIApp, idleness: Idleness) -> None:
        self._app = app
        self._idleness = idleness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("method") in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        with self._idleness.request():
            await self._app(scope, receive, send)


class LimitBody:
    """Answers 413 to bodies over ``limit_for(scope)`` bytes: at once if the client gives a length,
    else when it has sent too much. Answers 408 where no byte comes for ``timeout_s`` seconds."""

    def __init__(self, app: ASGIApp, limit_for: Callable[[Scope], int], timeout_s: float = 60.0) -> None:
        self._app = app
        self._limit_for = limit_for
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_for(scope)
        too_large = TooLarge(
            f"The request's body is over {limit:,} bytes.",
            hint="Send less at a time, or raise max_body_bytes, max_upload_bytes or the API key's limit.",
        )
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > limit:
            await _refuse(too_large, scope, receive, send)
            return
        received, complete, started = 0, False, False
        refusal: RagserveError | None = None

        async def receive_within_limit() -> Message:
            nonlocal received, complete, refusal
            if complete:  # what follows is the disconnect, which may take hours
                return await receive()
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError:
                refusal = RequestTimeout(
                    f"No byte of the request's body came for {self._timeout_s:g} s.", hint="Send it again."
                )
                raise refusal from None
            complete = message["type"] != "http.request" or not message.get("more_body")
            received += len(message.get("body", b""))
            if received > limit:
                if not complete:
                    await drain(receive)
                refusal = too_large
                raise refusal
            return message

        async def send_unless_refused(message: Message) -> None:
            nonlocal started
            if (
                refusal is None or started
            ):  # SGLang answers a body that cannot be read with an error of its own
                started = True
                await send(message)

        try:
            await self._app(scope, receive_within_limit, send_unless_refused)
        except Exception:
            if refusal is None or started:
                raise
        if refusal is not None and not started:
            raise refusal


async def _refuse(error: RagserveError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer before reading: a client that sent ``Expect: 100-continue`` then never sends its body."""
    answer = errors.response(error, scope["state"]["request_id"])
    answer.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
    await drain(receive)
    await send({"type": "http.response.body", "body": b""})
