"""`ragserve serve`: one address for documents, questions and all of SGLang's own routes."""

from __future__ import annotations

import logging
import os
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragserve import logs, tracing
from ragserve.cache import lock
from ragserve.commands.options import with_settings
from ragserve.commands.serve_checks import check_start
from ragserve.config import Settings
from ragserve.engine.ports import KEEP_ALIVE_S, address, hold_port, port_of
from ragserve.files import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ragserve.api.starting import StartingAnswers
    from ragserve.engine.base import Engine, EngineInfo
    from ragserve.engine.proxy import ReverseProxy

log = logging.getLogger("ragserve")


def register(app: typer.Typer) -> None:
    app.command("serve", help="Serve your documents, the OpenAI API and every SGLang route on one address.")(
        with_settings(serve)
    )


def serve(
    settings: Settings,
    worker: Annotated[
        bool, typer.Option("--worker", help="Serve an engine and its document cache only, for --workers.")
    ] = False,
) -> None:
    """Start the engine (or connect to --engine-url or --workers) and serve until SIGINT, SIGTERM or
    SIGHUP."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive our forks
    # Server, scheduler and detokenizer share the cores; threads spinning at barriers would starve each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with hold_port(settings.host, settings.port) as listener:
        check_start(settings, worker=worker)
        _serve(settings.model_copy(update={"port": port_of(listener)}), listener, worker)


def _serve(settings: Settings, listener: socket.socket, worker: bool) -> None:
    logs.configure(settings.log_level, settings.log_format)
    if settings.otlp_endpoint is not None:
        tracing.start(tracing.exporter(settings.otlp_endpoint))
    _say(
        settings, f"starting on http://{address(settings.host, settings.port)} (data in {settings.data_dir})"
    )
    if not settings.has_key:
        _say(settings, "no API key set, so only this machine can connect")
    try:
        with temporary_folder(sockets=not (settings.engine_url or settings.engine_elsewhere)):
            if settings.engine_url:
                _serve_remote(settings, listener)
            elif settings.engine_elsewhere:
                _serve_workers(settings, listener)
            else:
                _serve_local(settings, listener, worker)
    finally:
        tracing.stop()


def _serve_local(settings: Settings, listener: socket.socket, worker: bool) -> None:
    from ragserve.engine.compat import start_template

    start_template()  # before the imports that it is to be beside
    _serve_engine(settings, listener, worker)


def _serve_engine(settings: Settings, listener: socket.socket, worker: bool) -> None:
    from ragserve.api.starting import StartingAnswers
    from ragserve.engine import local
    from ragserve.fleet.worker_about import identity

    if worker:
        identity(settings.data_dir)  # a damaged one ends the start before the model is loaded
    starting = StartingAnswers(listener, "the engine loads its model")

    def make_app(engine: local.LocalEngine, sglang_app: Any) -> Any:
        from ragserve.api.app import create_app
        from ragserve.fleet.worker_app import create_worker_app

        starting.reason = "the engine warms up, and documents are being opened"
        make = create_worker_app if worker else partial(create_app, serve_metrics=True)
        app = make(
            settings,
            engine,
            upstream=sglang_app,
            upstream_lifespan=lambda: sglang_app.router.lifespan_context(sglang_app),
        )
        return _announced(app, settings, starting, lambda: engine.info, pages=not worker)

    with lock.shared(settings.data_dir):
        try:
            local.serve(settings, make_app, listener, on_launch=starting.start)
        finally:
            starting.stop()


def _serve_remote(settings: Settings, listener: socket.socket) -> None:
    from ragserve.engine.proxy import ReverseProxy
    from ragserve.engine.remote import RemoteEngine

    _serve_in_front(settings, RemoteEngine(settings), ReverseProxy(settings), listener)


def _serve_workers(settings: Settings, listener: socket.socket) -> None:
    from ragserve.engine.proxy import ReverseProxy
    from ragserve.fleet.fleet_engine import FleetEngine
    from ragserve.fleet.replicas import replicas

    with lock.shared(settings.data_dir), replicas(settings) as started:
        engine = FleetEngine(
            started.settings,
            started.urls,
            start_s=started.start_s,
            failed=started.why_failed,
            look=started.look,
        )
        proxy = ReverseProxy(started.settings, lambda: engine.least_loaded().url)
        _serve_in_front(settings, engine, proxy, listener)


def _serve_in_front(settings: Settings, engine: Engine, proxy: ReverseProxy, listener: socket.socket) -> None:
    import contextlib
    from collections.abc import AsyncIterator

    import uvicorn

    from ragserve.api.app import create_app
    from ragserve.api.starting import StartingAnswers

    @contextlib.asynccontextmanager
    async def proxy_lifespan() -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = create_app(settings, engine, upstream=proxy, upstream_lifespan=proxy_lifespan, serve_metrics=True)
    starting = StartingAnswers(listener, "the engine elsewhere has not been reached")
    config = uvicorn.Config(
        _announced(app, settings, starting, lambda: engine.info),
        log_level="warning",
        loop="uvloop",
        timeout_graceful_shutdown=10,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    starting.start()
    try:
        server.run(sockets=[listener])
    finally:
        starting.stop()
    if not server.started:  # uvicorn has logged why
        raise SystemExit(3)


def _announced(
    app: ASGIApp,
    settings: Settings,
    starting: StartingAnswers,
    info: Callable[[], EngineInfo],
    *,
    pages: bool = True,
) -> ASGIApp:
    """Wrap ``app``: end the answers of a ``starting`` server when the start-up is complete, and say where the
    server and its ``pages`` are, and how long the engine took by its ``info``."""
    url = f"http://{address(settings.host, settings.port)}"
    where = f"; playground: {url}/playground, API: {url}/docs" if pages else ""

    async def announced(scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                starting.stop()  # uvicorn listens a moment later; connections wait for that
                _say(settings, f"ready on {url}{_took(info())}{where}")
            await send(message)

        await app(scope, receive, told if scope["type"] == "lifespan" else send)

    return announced


def _took(info: EngineInfo) -> str:
    if info.start_s is None or info.warm_up_s is None:
        return ""
    return f" (engine started in {info.start_s:.1f} s, {info.warm_up_s:.1f} s of them warming up)"


def _say(settings: Settings, line: str) -> None:
    """Tell the operator, whatever the log's level; with JSON logs as one of their lines."""
    if settings.log_format == "json":
        log.log(max(logging.INFO, log.getEffectiveLevel()), line)
    else:
        typer.echo(f"ragserve: {line}", err=True)
