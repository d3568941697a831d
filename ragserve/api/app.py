"""The ASGI app: ragserve's routes in front of SGLang's app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from ragserve import tracing
from ragserve.answering.in_flight import Idleness
from ragserve.api import (
    cache,
    chunks,
    docs_page,
    documents,
    errors,
    ingest,
    model_routes,
    namespace_settings,
    openai,
    openapi,
    playground,
    preview,
    query,
    ratings,
    retrieve,
    sessions,
    sso,
    system,
)
from ragserve.api.access import check_route
from ragserve.api.authentication import Authentication
from ragserve.api.browsers import RefuseForeignPages, named_origins, names
from ragserve.api.middleware import LimitBody, NoteRequests, RequestContext
from ragserve.api.openai_schemas import ChatChunk, ChatRequest
from ragserve.api.schemas import IngestTexts, IngestUrls
from ragserve.api.services import Services, load_embedder, open_services
from ragserve.api.trace_requests import TraceRequests
from ragserve.api.upstream import Upstream
from ragserve.config import Settings
from ragserve.engine.base import Engine
from ragserve.sso.single_sign_on import SingleSignOn
from ragserve.tenants.audit_log import AuditLog
from ragserve.tenants.keyring import Keyring
from ragserve_index.viewers import Viewer

_WITH_MEDIA = frozenset(
    {
        "/classify",
        "/encode",
        "/generate",
        "/v1/audio/transcriptions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
    }
)


def create_app(
    settings: Settings,
    engine: Engine,
    *,
    upstream: ASGIApp,
    upstream_lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    serve_metrics: bool = False,
    embedder: Callable[[Settings], Any] = load_embedder,
) -> FastAPI:
    """Build the app.

    Args:
        settings: Settings of the server.
        engine: Not yet started; the app starts and closes it.
        upstream: Gets every request that matches none of our routes.
        upstream_lifespan: Entered first and left last.
        serve_metrics: Serve /metrics; for an ``upstream`` that does not.
        embedder: Loads the embedder, in a thread.

    A part that cannot start fails the app's start-up with its RagserveError."""

    idleness = Idleness()
    sign_on = SingleSignOn(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if upstream_lifespan is not None:
                await stack.enter_async_context(upstream_lifespan())
            services = open_services(settings, engine, embedder, idleness)
            stack.push_async_callback(sign_on.close)
            app.state.services = await stack.enter_async_context(services)
            try:
                yield
            finally:
                app.state.services = None

    app = FastAPI(
        title="ragserve",
        description=openapi.DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # `docs_page` is ours
        redoc_url=None,
        telemetry={"tracing": False},  # by SGLang's provider, in other traces than ours
        dependencies=[Depends(check_route)],
    )
    app.state.upstream = Upstream(
        upstream,
        control_routes=settings.control_routes,
        remote=settings.engine_elsewhere,
        every_grammar=settings.grammars == "all",
        context_length=lambda: engine.info.context_length,
        hides=partial(_hides, app),
    )
    app.state.services = None
    app.state.sso = sign_on
    for module in (
        query,
        sessions,
        retrieve,
        ingest,
        preview,
        documents,
        chunks,
        namespace_settings,
        ratings,
        cache,
        openai,
        model_routes,
        system,
        docs_page,
        playground,
        sso,
    ):
        app.include_router(module.router)
    if serve_metrics:
        app.include_router(system.metrics_router)
    app.router.default = app.state.upstream
    # The last middleware added is the outermost.
    app.add_middleware(NoteRequests, idleness=idleness)
    app.add_middleware(LimitBody, limit_for=partial(_body_limit, settings), timeout_s=settings.body_timeout_s)
    origins = named_origins(settings.cors_origins)
    api_key = None if settings.api_key is None else settings.api_key.get_secret_value()
    keyring = Keyring(settings.data_dir, api_key, closed=sign_on.is_on)
    audit = AuditLog(settings.data_dir, settings.audit_log_bytes)
    app.add_middleware(Authentication, keyring=keyring, audit=audit, sso=sign_on)
    app.add_middleware(  # pages cannot know a key
        RefuseForeignPages,
        hosts=names(settings.allowed_hosts),
        origins=origins,
        applies=lambda: keyring.is_open,
    )
    app.add_middleware(RequestContext)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "Location"],
        )
    if tracing.is_on():
        app.add_middleware(TraceRequests)
    errors.install(app)
    bodies: list[type[BaseModel]] = [IngestTexts, IngestUrls, ChatRequest, ChatChunk, *model_routes.BODIES]
    openapi.install(app, [*bodies, *query.EVENTS.values()])
    return app


def _hides(app: FastAPI, namespace: str, viewer: Viewer) -> bool:
    """Whether a namespace has documents that a viewer does not see; True while nobody can tell."""
    services: Services | None = app.state.services
    return services is None or services.store.seen_by(viewer).hides(namespace)


def _body_limit(settings: Settings, scope: Scope) -> int:
    path, caller = scope["path"], scope["state"]["access"]
    if path == preview.PATH:
        return min(settings.max_upload_bytes, caller.who.limits.max_upload_bytes or settings.max_upload_bytes)
    if path == "/rag/ingest":
        form = Headers(scope=scope).get("content-type", "").startswith("multipart/form-data")
        limit = settings.max_upload_bytes * settings.max_upload_files if form else settings.max_body_bytes
        return min(limit, caller.who.limits.max_upload_bytes or limit)
    # Those may carry images or audio to SGLang. It tokenises the rest in the event loop. Chats with
    # namespaces get max_body_bytes once the model is known.
    large = settings.max_upload_bytes if path in _WITH_MEDIA else 0
    return max(large, settings.max_body_bytes)
