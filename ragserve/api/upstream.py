"""SGLang's own app behind ours: it gets what no route of ours claims, as if we were not there."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve.errors import EngineError

# What a server puts into a scope; the rest is our routers' and must not reach another app's.
_SERVERS_OWN = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
    "extensions",
    "state",
    "subprotocols",
)


class Upstream:
    """An ASGI app that hands requests on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({name: scope[name] for name in _SERVERS_OWN if name in scope}, receive, send)

    def replay(self, body: bytes) -> Response:
        """An answer for a route of ours that has read the body: the other app's, which gets the body again."""
        return _Replayed(self, body)

    async def models(self) -> list[dict[str, Any]]:
        """The other app's ``/v1/models``. Raises EngineError where it has none."""
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self._app), base_url="http://engine"
        ) as client:
            response = await client.get("/v1/models")
        try:
            models = response.raise_for_status().json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise EngineError(
                "The engine does not list its models.", hint="See /ready and the server's log."
            ) from error
        return list(models)


class _Replayed(Response):
    def __init__(self, upstream: Upstream, body: bytes) -> None:
        super().__init__()
        self._upstream = upstream
        self._replayed = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if given:
                return await receive()  # only the client's leaving is still to come
            given = True
            return {"type": "http.request", "body": self._replayed, "more_body": False}

        await self._upstream(scope, receive_again, send)
