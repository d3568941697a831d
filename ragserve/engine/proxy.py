"""Reverse proxy for a remote SGLang: forwards all requests that are not ours, streamed both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from ragserve.config import Settings
from ragserve.disconnects import until_left
from ragserve.errors import InvalidRequest, Unavailable

# RFC 9110 section 7.6.1
_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
# set by httpx, or not for the engine
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"authorization", b"cookie", b"accept-encoding"}
_NOT_RETURNED = _HOP_BY_HOP | {b"set-cookie"}  # browsers would take it for one of ours


class ReverseProxy:
    """ASGI app that forwards requests. Callers' credentials stay here; the engine gets its own key."""

    def __init__(self, settings: Settings, address: Callable[[], str] | None = None) -> None:
        """``address``: of the engine for the next request; by default that of the settings."""
        self._address = address or (lambda: settings.engine_url or "")
        self._key = settings.engine_api_key
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.engine_timeout_s, connect=10),
            # not so long that the engine's server closes a connection just when a request comes
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1011, "reason": "websockets are not forwarded"})
            return
        # As the client sent it: a decoded path would be read anew. One without a slash would become part of
        # the host and take the engine's key along.
        path = scope.get("raw_path") or scope["path"].encode()
        if not path.startswith(b"/"):
            refusal = InvalidRequest("The request's target must begin with a slash.", code="invalid_target")
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
            return
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in _NOT_FORWARDED]
        if self._key:
            headers.append((b"authorization", f"Bearer {self._key.get_secret_value()}".encode()))
        url = httpx.URL(self._address().rstrip("/"))
        query = scope.get("query_string", b"")
        target = url.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        has_body = any(k.lower() in (b"content-length", b"transfer-encoding") for k, _ in scope["headers"])
        forwarded = asyncio.Event()
        request = self._client.build_request(
            scope["method"],
            url.copy_with(raw_path=target),
            headers=headers,
            content=_body(receive, forwarded) if has_body else None,
        )
        if not has_body:
            forwarded.set()

        async def receive_behind() -> Message:
            await forwarded.wait()  # one at a time may receive
            return await receive()

        # From here on: the headers of an answer that is not streamed come at its end.
        try:
            await until_left(receive_behind, self._forward(url, request, forwarded, send))
        except Unavailable as failure:
            await JSONResponse(failure.body(), failure.status)(scope, receive, send)

    async def _forward(
        self, address: httpx.URL, request: httpx.Request, forwarded: asyncio.Event, send: Send
    ) -> None:
        """Send a request to the engine at ``address``, and its answer back. Cancelled, it closes the
        connection, so that the engine aborts. Raises Unavailable."""
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise Unavailable(
                f"The engine at {address} does not answer: {error!r}.",
                hint="Is it running?",
                code="engine_unreachable",
            ) from error
        forwarded.set()  # an engine that refuses does not read all of a body
        try:
            kept = [(k.lower(), v) for k, v in response.headers.raw if k.lower() not in _NOT_RETURNED]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for piece in response.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


async def _body(receive: Receive, forwarded: asyncio.Event) -> AsyncIterator[bytes]:
    """The body of the client's request; then set ``forwarded``. Raises ClientDisconnect, so that the engine
    takes no part of a body for the whole."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)
    forwarded.set()
