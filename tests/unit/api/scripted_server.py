"""The product's app on a real socket, with the real index, prompts and ingestion; only the model and the
embedder are scripted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from ragserve.api.app import create_app
from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.ports import KEEP_ALIVE_S
from ragserve.errors import RagserveError
from ragserve.tenants.key_file import KeyFile
from ragserve_index.types import NewChunk, NewDocument
from sglang_ext.wire.protocol import PrefillReport
from tests.unit.api.word_embedder import DIM, WordEmbedder

_PREFILLED = PrefillReport("vertical_slash", 0.9, 40, 0.25, 3.5, 1.0)
_ALIKE = base64.b64encode(np.log(np.full(4, 0.25)).astype("<f4").tobytes()).decode()  # a distribution


class ScriptedEngine:
    """Says what it is told to; ``running`` are the requests it has not finished, ``aborted`` those whose
    reader left.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = str(tokenizer)
        self.reset()

    def reset(self) -> None:
        self.deltas: Sequence[str] = (" Alan", " Stevenson", " [1]", ".")
        self.reply: Callable[[GenerateRequest], Sequence[str] | None] = lambda request: None  # None: deltas
        self.cached = 0
        self.forgotten: list[tuple[str, Any]] = []
        self.finish_reason = "stop"
        self.error: Exception | None = None
        self.error_after = 0
        self.hold = threading.Event()  # clear: the engine never goes on after the first delta
        self.hold.set()
        self.is_ready = True
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []

    async def start(self) -> EngineInfo:
        return self.info

    @property
    def info(self) -> EngineInfo:
        strategies = ("full", "prefix", "epic", "samkv")
        return EngineInfo(
            "local",
            "scripted",
            self._tokenizer,
            "0",
            "cpu",
            "none",
            2048,
            4096,
            strategies,
            "print",
            dtype="float32",
        )

    async def ready(self) -> bool:
        return self.is_ready

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.requests.append(request)
        self.running.add(request.rid)
        finished = False
        deltas = self.reply(request) or self.deltas
        try:
            for place, delta in enumerate(deltas):
                if self.error is not None and place == self.error_after:
                    finished = True
                    raise self.error
                last = place == len(deltas) - 1
                usage = EngineUsage(len(request.input_ids), self.cached, place + 1)
                finished = last
                yield GenerateChunk(
                    delta,
                    usage,
                    EngineTimings(0.5, 1.5),
                    self.finish_reason if last else None,
                    distributions=[_ALIKE] * request.distributions if last else (),
                    output_ids=tuple(range(len(deltas))) if last else (),
                    prefill=PrefillReport("vertical_slash", 0.9, 40, 0.25, 3.5, 1.0)
                    if last and request.prefill and "dense_below" not in request.prefill
                    else None,
                )
                await asyncio.sleep(0)
                while not self.hold.is_set():
                    await asyncio.sleep(0.005)
        finally:
            self.running.discard(request.rid)
            if not finished:
                self.aborted.append(request.rid)

    async def forget(self, namespace: str, documents: Any) -> None:
        self.forgotten.append((namespace, documents))

    async def close(self) -> None:
        return None


@dataclass
class Live:
    """A running server with everything a test may want to look into."""

    url: str
    app: Any
    engine: ScriptedEngine
    embedder: WordEmbedder
    settings: Settings
    seen_upstream: list[dict[str, Any]] = field(default_factory=list)

    @property
    def services(self) -> Any:
        return self.app.state.services

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=240, **options)

    def index(self, namespace: str, texts: dict[str, str], **metadata: Any) -> None:
        """Documents of one chunk each, straight into the store."""
        store = self.services.store
        store.ensure_namespace(namespace, embedder="words", dim=DIM)
        batch = [
            chunk_of(name, text, {"name": name, **metadata}, self.embedder) for name, text in texts.items()
        ]
        store.replace_documents(namespace, batch)
        self.embedder.calls.clear()


def chunk_of(
    name: str, text: str, metadata: dict[str, Any] | None = None, embedder: WordEmbedder | None = None
) -> tuple[NewDocument, list[NewChunk], Any]:
    """A document of one chunk with its vector."""
    digest = str(zlib.crc32(text.encode()))
    document = NewDocument(name, name.title(), digest, "text/plain", len(text), metadata or {})
    vectors = (embedder or WordEmbedder()).encode([text])
    return document, [NewChunk(text, 0, len(text), len(text.split()))], vectors


class Tenants:
    """A server without `--api-key`, and clients with keys of its data folder."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.keys = KeyFile(live.settings.data_dir)

    def client(self, name: str, rights: str, *namespaces: str, **options: Any) -> httpx.Client:
        """A client with a new key."""
        _, secret = self.keys.create(name, namespaces, rights.split(), **options)  # type: ignore[arg-type]
        return self.live.client(headers={"Authorization": f"Bearer {secret}"})

    def audited(self) -> list[dict[str, Any]]:
        path = self.live.settings.data_dir / "audit" / "audit.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def asgi_client(app: Any, secret: str) -> httpx.AsyncClient:
    """A client with an API key of an app that is not started: only what needs no services works."""
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers)


@contextmanager
def raw_request(live: Live, path: str, body: dict[str, object]) -> Iterator[socket.socket]:
    """A request on a socket of its own, closed when the block ends."""
    data = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    head = "\r\n".join((*lines, "", ""))
    with socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1])), timeout=240) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another thread does; fails after far longer than it takes."""
    deadline = time.monotonic() + 240
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"never happened: {what}")
        time.sleep(0.005)


def upstream_app(seen: list[dict[str, Any]]) -> Starlette:
    """Stands where SGLang's app does."""

    async def echo(request: Request) -> Response:
        body = await request.body()
        seen.append(
            {"path": request.url.path, "method": request.method, "body": body, "scope": dict(request.scope)}
        )
        if request.url.path == "/generate" and body.startswith(b"{"):
            return JSONResponse({"text": " Alan Stevenson [1]."})
        return JSONResponse({"upstream": request.url.path, "size": len(body)})

    async def models(request: Request) -> Response:
        return JSONResponse(
            {
                "object": "list",
                "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "sglang", "root": "x"}],
            }
        )

    async def model(request: Request) -> Response:
        id_ = request.path_params["id"]
        return JSONResponse({"id": id_, "object": "model", "created": 1, "upstream": request.url.path})

    async def fails(request: Request) -> Response:
        raise RuntimeError("secret detail")

    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/ping", fails),
            WebSocketRoute("/v1/realtime", socket),
            Route("/{path:path}", echo, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
    )


@contextmanager
def serving(
    data_dir: Path,
    model: Path,
    *,
    serve_metrics: bool = True,
    load: Callable[[Settings], Any] | None = None,
    listener: socket.socket | None = None,
    **options: Any,
) -> Iterator[Live]:
    """The app with a scripted engine, until the block ends. ``load``: what loads another embedder;
    ``listener``: a bound socket, for those who must know the address before."""
    settings = Settings(data_dir=data_dir, model=str(model), **{"verify_share": 0, **options})
    engine, embedder = ScriptedEngine(model), WordEmbedder()
    seen: list[dict[str, Any]] = []
    app = create_app(
        settings,
        engine,
        upstream=upstream_app(seen),
        serve_metrics=serve_metrics,
        embedder=load or (lambda _: embedder),
    )
    with running(app, listener) as url:
        yield Live(url, app, engine, embedder, settings, seen)


@contextmanager
def running(app: Any, listener: socket.socket | None = None) -> Iterator[str]:
    """Serve the app by uvicorn in a thread, on ``listener`` or a free port, until the block ends: its
    address."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            log_level="error",
            lifespan="on",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=KEEP_ALIVE_S,  # longer than clients keep theirs
        )
    )
    sockets = None if listener is None else [listener]
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), "start-up")
        if not server.started:
            raise RagserveError("the app did not start")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(240)


DOCUMENTS = {
    "skerryvore": "The lighthouse of Skerryvore was built by Alan Stevenson.",
    "bell": "The lighthouse of Bell Rock was built by Robert Stevenson.",
    "soup": "A soup of leeks and potatoes is made in half an hour.",
}
