"""SGLang's own app behind ours: it gets all requests that match none of our routes, unchanged."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve.errors import EngineError

# Set by the web server; the other keys are our routers' and must not reach another app.
_SERVER_KEYS = (
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
    """ASGI app that passes requests on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({name: scope[name] for name in _SERVER_KEYS if name in scope}, receive, send)

    def replay(self, body: bytes) -> Response:
        """Answer with the other app, replaying a body that our route has already read."""
        return _Replayed(self, body)

    async def models(self) -> list[dict[str, Any]]:
        """Read the other app's ``/v1/models``. Raises EngineError if it has none."""
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
                return await receive()  # only a disconnect can follow
            given = True
            return {"type": "http.request", "body": self._replayed, "more_body": False}

        await self._upstream(scope, receive_again, send)
