"""SGLang's own app behind ours: it gets requests to the routes of its that we serve, unchanged.

Its other routes control the engine (stop it, load weights, write profiles, open sessions). Only some are
marked as such, so the ones that are served are named here."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve.api.body import parse_json
from ragserve.errors import EngineError, InvalidRequest, NotFound

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


SERVED = frozenset(
    {
        "/",
        "/abort_request",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/api/tags",
        "/classify",
        "/detokenize",
        "/encode",
        "/generate",
        "/get_load",
        "/get_model_info",
        "/get_server_info",
        "/get_weight_version",
        "/health",
        "/health_generate",
        "/invocations",
        "/metrics",
        "/metrics/",
        "/model_info",
        "/parse_function_call",
        "/ping",
        "/separate_reasoning",
        "/server_info",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/v1/chat/completions",
        "/v1/classify",
        "/v1/completions",
        "/v1/detokenize",
        "/v1/embeddings",
        "/v1/loads",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/realtime",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v1/tokenize",
        "/vertex_generate",
        "/weight_version",
    }
)
MIN_RID_CHARS = 8
_SERVED_BELOW = ("/v1/models/", "/v1/responses/")


class Upstream:
    """ASGI app that passes requests on; with ``control_routes`` to all routes.

    A browser's Origin stays here: SGLang lets pages of any origin read its answers."""

    def __init__(self, app: ASGIApp, *, control_routes: bool = False) -> None:
        self._app = app
        self._control_routes = control_routes
        self._models: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._control_routes and scope["type"] in ("http", "websocket"):
            path = scope["path"]
            if path not in SERVED and not path.startswith(_SERVED_BELOW):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008, "reason": "no such route"})
                    return
                raise NotFound(
                    f"There is no route {path[:128]!r} here.",
                    hint="See /docs. SGLang's routes that control the engine are off: the server's "
                    "--control-routes true opens them.",
                    code="route_not_found",
                )
            if path == "/abort_request":
                await self._abort(scope, receive, send)
                return
        await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        passed = {name: scope[name] for name in _SERVER_KEYS if name in scope}
        passed["headers"] = [(name, value) for name, value in scope["headers"] if name.lower() != b"origin"]
        await self._app(passed, receive, send)

    async def _abort(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request be aborted by its id. SGLang takes an id as a prefix: an empty or short one, or
        ``abort_all``, would end the requests of others."""
        body = await Request(scope, receive).body()
        data = await parse_json(body)
        rid = data.get("rid") if isinstance(data, dict) else None
        if not isinstance(rid, str) or len(rid) < MIN_RID_CHARS or data.get("abort_all"):
            raise InvalidRequest(
                f"rid must be the id of one request, of {MIN_RID_CHARS} characters at least.",
                hint="The server's --control-routes true also aborts by prefix, or all.",
                param="rid",
            )
        await _Replayed(self._forward, body)(scope, receive, send)

    async def knows(self, model: str) -> bool:
        """Return whether the other app serves a model of this name, or an adapter of one (``model:adapter``).

        Raises EngineError if it does not list its models."""
        if model not in self._models:
            self._models = frozenset(
                one["id"] for one in await self.models() if isinstance(one, dict) and "id" in one
            )
        return model in self._models or model.partition(":")[0] in self._models

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
    def __init__(self, app: ASGIApp, body: bytes) -> None:
        super().__init__()
        self._app = app
        self._replayed = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if given:
                return await receive()  # only a disconnect can follow
            given = True
            return {"type": "http.request", "body": self._replayed, "more_body": False}

        await self._app(scope, receive_again, send)
