"""The app of `ragserve serve --worker`: an engine's generation and document cache, for servers in front."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from fastapi import Depends, FastAPI
from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve import __version__
from ragserve.api import errors
from ragserve.api.access import check_route
from ragserve.api.authentication import Authentication
from ragserve.api.body import RequestModel
from ragserve.api.json_route import CheckedRoute
from ragserve.api.middleware import LimitBody, RequestContext
from ragserve.api.upstream import SERVED, Upstream
from ragserve.config import Settings
from ragserve.engine.base import EngineInfo
from ragserve.errors import Unavailable
from ragserve.fleet.plain_generate import PlainGenerate
from ragserve.fleet.routed_app import NamedAnswers, RoutedApp
from ragserve.fleet.worker_about import WorkerAbout, identity
from ragserve.tenants.audit_log import AuditLog
from ragserve.tenants.keyring import Keyring
from ragserve_index.viewers import EVERYTHING


class ServedEngine(Protocol):
    """The engine of a worker."""

    async def start(self) -> EngineInfo: ...

    @property
    def info(self) -> EngineInfo: ...

    async def ready(self) -> bool: ...

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]: ...

    def outputs(self, fields: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]: ...

    async def close(self) -> None: ...


class ControlRequest(RequestModel):
    """An operation of the document cache (`sglang_ext.process.control`)."""

    operation: str = Field(max_length=64)
    arguments: dict[str, Any] = Field(default_factory=dict)


class DrainRequest(RequestModel):
    """Whether to refuse new requests."""

    draining: bool = True


class DrainableApp:
    """ASGI app that counts the requests that run the model, and refuses new ones while it drains."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.draining = False
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if SERVED.get(scope["path"]) != "read":
            await self._app(scope, receive, send)
            return
        if self.draining:
            raise Unavailable(
                "This worker takes no new requests: it is being drained.",
                hint="Send it to another worker.",
                code="draining",
            )
        running = 1
        self.in_flight += running

        def ended() -> None:
            nonlocal running
            self.in_flight -= running
            running = 0

        async def send_counted(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended()  # SGLang's task behind a stream goes on for two seconds

        try:
            await self._app(scope, receive, send_counted)
        finally:
            ended()


def create_worker_app(
    settings: Settings,
    engine: ServedEngine,
    *,
    upstream: ASGIApp,
    upstream_lifespan: Callable[[], AbstractAsyncContextManager[None]],
) -> FastAPI:
    """Build the app. Every route but ``/health`` needs a key with all rights.

    ``upstream`` is SGLang's app, whose ``/generate`` runs plans as well as plain requests."""
    gate = DrainableApp(PlainGenerate(upstream, engine.outputs))
    boot = uuid.uuid4().hex
    known: dict[str, str] = {}

    def name() -> str:
        return known.get("id", "")

    routed = RoutedApp(gate, name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(upstream_lifespan())
            await engine.start()
            stack.push_async_callback(engine.close)
            known["fingerprint"] = (await engine.control("info"))["fingerprint"]
            known["id"] = identity(settings.data_dir)
            yield

    app = FastAPI(
        title="ragserve worker",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(check_route)],
    )

    app.router.route_class = CheckedRoute

    @app.get("/worker")
    async def about() -> dict[str, Any]:
        """Identity, model, load. Raises Unavailable while the engine does not serve."""
        if not known or not await engine.ready():
            raise Unavailable("The engine does not serve requests.", hint="See the worker's log.")
        return WorkerAbout(
            id=known["id"],
            boot=boot,
            ragserve=__version__,
            cache_fingerprint=known["fingerprint"],
            engine=engine.info,
            draining=gate.draining,
            in_flight=gate.in_flight,
        ).to_json()

    @app.post("/worker/control")
    async def control(body: ControlRequest) -> dict[str, Any]:
        """Run an operation of the document cache on all ranks, to its end."""
        return await engine.control(body.operation, **body.arguments)

    @app.post("/worker/drain")
    async def drain(body: DrainRequest) -> dict[str, Any]:
        """Refuse new requests, or take them again. Those that run go on; ask again for how many are left."""
        gate.draining = body.draining
        return {"draining": gate.draining, "in_flight": gate.in_flight}

    @app.get("/worker/probes/{probe}")
    async def probed(probe: str) -> dict[str, bool]:
        """Return whether the reader of a probe's answer has left before its end, once it has ended."""
        return {"left": await routed.left(probe)}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Answer 503 while the worker takes no requests."""
        if gate.draining or not await engine.ready():
            raise Unavailable("This worker takes no requests now.", hint="See GET /worker.", code="not_ready")
        return JSONResponse({"ready": True, "missing": []})

    app.router.default = Upstream(
        routed,
        control_routes=settings.control_routes,
        worker=True,
        every_grammar=settings.grammars == "all",
        context_length=lambda: engine.info.context_length,
        hides=lambda namespace, viewer: viewer != EVERYTHING,  # labels are known to the servers in front
    )
    limit = max(settings.max_upload_bytes, settings.max_body_bytes)
    app.add_middleware(LimitBody, limit_for=lambda _: limit, timeout_s=settings.body_timeout_s)
    api_key = None if settings.api_key is None else settings.api_key.get_secret_value()
    app.add_middleware(
        Authentication,
        keyring=Keyring(settings.data_dir, api_key),
        audit=AuditLog(settings.data_dir, settings.audit_log_bytes),
    )
    app.add_middleware(RequestContext)
    app.add_middleware(NamedAnswers, name=name)
    errors.install(app)
    return app
