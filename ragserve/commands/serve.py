"""`ragserve serve`: one address for documents, questions and all of SGLang's own routes."""

from __future__ import annotations

import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import typer

from ragserve import logs, tracing
from ragserve.cache import lock
from ragserve.commands.options import with_settings
from ragserve.commands.serve_checks import check_start
from ragserve.config import Settings
from ragserve.engine.ports import hold_port, port_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("ragserve")
_BACKLOG = 2048  # as uvicorn's


def register(app: typer.Typer) -> None:
    app.command("serve", help="Serve your documents, the OpenAI API and every SGLang route on one address.")(
        with_settings(serve)
    )


def serve(settings: Settings) -> None:
    """Start the engine (or connect to --engine-url) and serve until SIGINT, SIGTERM or SIGHUP."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive our forks
    # Server, scheduler and detokenizer share the cores; threads spinning at barriers would starve each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with hold_port(settings.host, settings.port) as listener:
        check_start(settings)
        _serve(settings.model_copy(update={"port": port_of(listener)}), listener)


def _serve(settings: Settings, listener: socket.socket) -> None:
    logs.configure(settings.log_level, settings.log_format)
    if settings.otlp_endpoint is not None:
        tracing.start(tracing.exporter(settings.otlp_endpoint))
    _say(settings, f"starting on http://{settings.host}:{settings.port} (data in {settings.data_dir})")
    if not settings.has_key:
        _say(settings, "no API key set, so only this machine can connect")
    try:
        if settings.engine_url:
            _serve_remote(settings, listener)
        else:
            _serve_local(settings, listener)
    finally:
        tracing.stop()


def _serve_local(settings: Settings, listener: socket.socket) -> None:
    from ragserve.engine import local

    def make_app(engine: local.LocalEngine, sglang_app: Any) -> Any:
        from ragserve.api.app import create_app

        app = create_app(
            settings,
            engine,
            upstream=sglang_app,
            upstream_lifespan=lambda: sglang_app.router.lifespan_context(sglang_app),
        )
        return _announced(app, settings, listener)

    with lock.shared(settings.data_dir):
        local.serve(settings, make_app, listener)


def _serve_remote(settings: Settings, listener: socket.socket) -> None:
    import contextlib
    from collections.abc import AsyncIterator

    import uvicorn

    from ragserve.api.app import create_app
    from ragserve.engine.proxy import ReverseProxy
    from ragserve.engine.remote import RemoteEngine

    proxy = ReverseProxy(settings)

    @contextlib.asynccontextmanager
    async def proxy_lifespan() -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = create_app(
        settings, RemoteEngine(settings), upstream=proxy, upstream_lifespan=proxy_lifespan, serve_metrics=True
    )
    config = uvicorn.Config(
        _announced(app, settings, listener), log_level="warning", loop="uvloop", timeout_graceful_shutdown=10
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    if not server.started:  # uvicorn has logged why
        raise SystemExit(3)


def _announced(app: ASGIApp, settings: Settings, listener: socket.socket) -> ASGIApp:
    """Wrap ``app``: say where the server is as soon as its start-up is complete and connections are taken."""

    async def announced(scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                listener.listen(_BACKLOG)  # uvicorn listens a moment later; connections wait for that
                _say(settings, f"ready on http://{settings.host}:{settings.port}")
            await send(message)

        await app(scope, receive, told if scope["type"] == "lifespan" else send)

    return announced


def _say(settings: Settings, line: str) -> None:
    """Tell the operator, whatever the log's level; with JSON logs as one of their lines."""
    if settings.log_format == "json":
        log.log(max(logging.INFO, log.getEffectiveLevel()), line)
    else:
        typer.echo(f"ragserve: {line}", err=True)
