"""SGLang's own app behind ours: it gets requests to the routes of its that we serve, and of their bodies
what `engine_bodies` lets through.

Its other routes control the engine (stop it, load weights, write profiles, open sessions) or run a parser
over what the client has already, in the event loop: some of their regular expressions take for ever. Only
some are marked as such, so the ones that are served are named here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pydantic_core
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ragserve.api.access import Access, Need
from ragserve.api.body import Replayed, parse_json, received
from ragserve.api.engine_bodies import FIELDS, SIZED, check_size, served_body
from ragserve.errors import EngineError, Forbidden, InvalidRequest, NotFound
from ragserve_index.viewers import Viewer
from sglang_ext.wire.cache_scope import CacheScope
from sglang_ext.wire.measuring import measuring
from sglang_ext.wire.token_meter import metered

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
# SGLang lets pages of any origin read its answers, and may inflate bodies without a limit.
_KEPT_HEADERS = (b"origin", b"x-body-compressed")

SERVED: dict[str, Need] = {
    "/": "key",
    "/abort_request": "operate",
    "/api/chat": "read",
    "/api/generate": "read",
    "/api/show": "key",
    "/api/tags": "key",
    "/classify": "read",
    "/detokenize": "key",
    "/encode": "read",
    "/generate": "read",
    "/get_load": "inspect",
    "/get_model_info": "key",
    "/get_server_info": "inspect",
    "/get_weight_version": "key",
    "/health": "none",
    "/health_generate": "key",
    "/invocations": "read",
    "/metrics": "metrics",
    "/metrics/": "metrics",
    "/model_info": "key",
    "/ping": "key",
    "/server_info": "inspect",
    "/tokenize": "key",
    "/v1/audio/transcriptions": "read",
    "/v1/chat/completions": "read",
    "/v1/classify": "read",
    "/v1/completions": "read",
    "/v1/detokenize": "key",
    "/v1/embeddings": "read",
    "/v1/loads": "inspect",
    "/v1/messages": "read",
    "/v1/messages/count_tokens": "key",
    "/v1/models": "key",
    "/v1/realtime": "read",
    "/v1/rerank": "read",
    "/v1/responses": "read",
    "/v1/score": "read",
    "/v1/tokenize": "key",
    "/vertex_generate": "read",
    "/weight_version": "key",
}
"""SGLang's routes that are served, and what a key needs for each. Those with ``read`` run the model."""
MIN_RID_CHARS = 8
# Stored responses are anyone's who knows their id: the engine does not know whose they are.
_RESPONSES = "/v1/responses"
# Only admins may read what is stored; it would stay for nothing, and what runs behind counts for no limit.
_UNSTORED = {"store": False, "background": False}
_SERVED_BELOW: dict[str, Need] = {"/v1/models/": "key", "/v1/responses/": "operate"}


class Upstream:
    """ASGI app that passes requests on; with ``control_routes`` to all routes.

    Keys without admin generate in a prefix cache of their own, or in that of a namespace that they may read
    and see all of.
    An engine that is ``remote`` has one for everybody, so they may not generate there by its own routes.

    A browser's Origin stays here."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        control_routes: bool = False,
        remote: bool = False,
        worker: bool = False,
        every_grammar: bool = False,
        context_length: Callable[[], int],
        hides: Callable[[str, Viewer], bool],
    ) -> None:
        """``worker``: the requests are those of servers in front, which measure. ``every_grammar``: those
        of clients may be other than JSON schemas. ``context_length``: of the model, once it has started.
        ``hides``: whether a namespace has documents that a viewer does not see, and so a cache that would
        tell of them."""
        self._hides = hides
        self._context_length = context_length
        self._every_grammar = every_grammar
        self._app = app
        self._measures = control_routes or worker
        self._control_routes = control_routes
        self._remote = remote
        self._models: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        need = _need(path)
        if need is None and not self._control_routes:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "no such route"})
                return
            raise NotFound(
                f"There is no route {path[:128]!r} here.",
                hint="See /docs. SGLang's routes that control the engine, or parse what the client has "
                "(/parse_function_call), are off: the server's --control-routes true opens them.",
                code="route_not_found",
            )
        access: Access = scope["state"]["access"]
        access.allow(need or "operate")
        if path in FIELDS and scope["method"] in ("POST", "PUT"):
            receive = await self._checked(access, scope, receive)
        if path == "/abort_request" and not self._control_routes:
            await self._abort(scope, receive, send)
        elif need == "read":
            access.check_tokens()
            with metered(access.spend):
                await self._generate(access, scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _checked(self, access: Access, scope: Scope, receive: Receive) -> Receive:
        """Read a JSON body and return how SGLang receives what it gets of it."""
        path, raw = scope["path"], await Request(scope, receive).body()
        data = await parse_json(raw)
        served = served_body(path, data, every_grammar=self._every_grammar)
        if path == _RESPONSES and not access.who.is_admin:
            served = served | _UNSTORED
        if path in SIZED:
            await asyncio.to_thread(check_size, path, served, self._context_length())
        if served is not data:
            raw = await asyncio.to_thread(pydantic_core.to_json, served)
            headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
            scope["headers"] = [*headers, (b"content-length", str(len(raw)).encode())]
        return received(raw, receive)

    async def _generate(self, access: Access, scope: Scope, receive: Receive, send: Send) -> None:
        if access.who.is_admin:
            with measuring(allowed=self._measures):
                await self._forward(scope, receive, send)
            return
        if self._remote:
            raise Forbidden(
                "SGLang's own routes need an API key with the right 'admin' here: the engine runs elsewhere, "
                "with one prefix cache for everybody.",
                hint="Use /rag/query, or a model ragserve/NAMESPACE.",
                code="missing_right",
            )
        who = access.who

        def reads(namespace: str) -> bool:
            return who.may("read", namespace) and not self._hides(namespace, who.viewer)

        with CacheScope(f"key:{who.owner}", reads).active():
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        passed = {name: scope[name] for name in _SERVER_KEYS if name in scope}
        passed["headers"] = [one for one in scope["headers"] if one[0].lower() not in _KEPT_HEADERS]
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
        await Replayed(self._forward, body)(scope, receive, send)

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
        return Replayed(self, body)

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


def _need(path: str) -> Need | None:
    """What a key needs for a path of SGLang's; None if it is not served."""
    if "\n" in path:  # which no pattern of a route matches
        return None
    below = (need for prefix, need in _SERVED_BELOW.items() if path.startswith(prefix))
    return SERVED.get(path) or next(below, None)
