"""Workers on real sockets, with the worker's app in front of an engine that keeps a ledger instead of KV."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ragserve.config import Settings, load
from ragserve.engine.base import Engine, EngineInfo, GenerateRequest
from ragserve.engine.ports import KEEP_ALIVE_S, hold_port, port_of
from ragserve.errors import EngineError
from ragserve.files import write_json
from ragserve.fleet.fleet_engine import FleetEngine
from ragserve.fleet.routing_key import ROUTING_KEY
from ragserve.fleet.worker_app import create_worker_app
from ragserve.metrics import metrics
from sglang_ext.wire.protocol import (
    MISSING_PREFIX,
    PLAN_FIELD,
    ContextPlan,
    ContextReport,
    Span,
    document_key,
)
from tests.conftest import MODEL
from tests.unit.api.scripted_server import eventually

T = TypeVar("T")
E = TypeVar("E", bound=Engine)
KEY = "workers-key"
PRINT = "fingerprint"
PAGE = 100
_KEY: ContextVar[str | None] = ContextVar("key", default=None)  # routing key of the request


@dataclass
class Ledger:
    """What a worker's tiers hold, by document key, and what it was asked; kept over restarts, as its disk
    is."""

    data_dir: Path
    documents: dict[str, int] = field(default_factory=dict)
    prefilled: list[str] = field(default_factory=list)
    removed: list[dict[str, Any]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)  # routing keys of requests
    peers: list[Any] = field(default_factory=list)  # addresses that requests came from
    aborted: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # requests whose reader left before their end
    refusal: Exception | None = None  # of every request
    bad: list[list[int]] = field(default_factory=list)  # documents that cannot be computed
    operations: list[str] = field(default_factory=list)
    memory_tokens: int = 4096
    deaf: bool = False  # its control operations fail
    tokens: list[int] | None = None  # of every text
    before_first: threading.Event = field(default_factory=threading.Event)  # cleared: no token comes
    after_first: threading.Event = field(default_factory=threading.Event)  # cleared: none but the first

    def __post_init__(self) -> None:
        self.before_first.set()
        self.after_first.set()


class LedgerEngine:
    """The engine's side of the control operations."""

    def __init__(self, ledger: Ledger, fields: Mapping[str, Any]) -> None:
        self.ledger = ledger
        self.info = EngineInfo(
            **{
                "kind": "local",
                "model": "m",
                "tokenizer": str(MODEL),
                "version": "0.5.17",
                "device": "cpu",
                "attention_backend": "none",
                "context_length": 2048,
                "max_total_tokens": 4096,
                "strategies": ("full", "prefix", "concat"),
                "fingerprint": PRINT,
                "dtype": "float32",
            }
            | fields
        )

    async def start(self) -> EngineInfo:
        return self.info

    async def ready(self) -> bool:
        return True

    async def close(self) -> None:
        return None

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        ledger = self.ledger
        if operation == "info":
            return {"fingerprint": PRINT, "strategies": ["concat"], "samkv": ""}
        ledger.operations.append(operation)
        if ledger.deaf:
            raise EngineError(f"The document cache failed to {operation}: it is deaf.")
        if operation == "where":
            held = [ledger.documents.get(key) == n for key, n in _pairs(arguments)]
            return {
                "on_device": held,
                "on_host": held,
                "below": ["disk" if one else "absent" for one in held],
                "lasting": "disk",
                "budget_bytes": 1000 * PAGE,
                "write_room_bytes": 100 * PAGE,
                "queued_bytes": 0,
                "block": 16,
                "page_bytes": PAGE,
                "faults": {"crc": 1},
            }
        if operation == "held":
            return {
                "documents": [[key[:16], n] for key, n in ledger.documents.items()],
                "in_memory": 0,
                "memory_tokens": ledger.memory_tokens,
                "disk_tokens": None,
                "scanned": True,
            }
        if operation == "prefix":
            return {"tokens": len(ledger.answered)}
        if operation == "score":
            return {
                "scores": [
                    float(len(ids)) if self._has(arguments["namespace"], ids) else None
                    for ids in arguments["documents"]
                ]
            }
        if operation == "stat":
            return {"disk": {"documents": len(ledger.documents), "bytes": PAGE, "budget_bytes": None}}
        if operation == "verify":
            return {"pages": 3, "bad": ["n/k: crc"] if ledger.documents else []}
        if operation == "remove":
            ledger.removed.append(arguments)
            gone = [key for key in arguments["keys"] if ledger.documents.pop(key, None)]
            return {"removed": len(gone)}
        if operation in ("remove_namespace", "remove_session", "clear"):
            ledger.removed.append({"op": operation} | arguments)
            ledger.documents.clear()
            return {"removed": 0}
        if operation in ("evict", "flush", "check"):
            return {}
        raise EngineError(f"no operation {operation!r}")

    async def outputs(self, fields: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        ended = False
        try:
            async for out in _answer(self.ledger, fields):
                ended = bool(out["meta_info"]["finish_reason"])
                yield out
        finally:
            if not ended:
                self.ledger.left.append(fields["rid"])

    def _has(self, namespace: str, ids: list[int]) -> bool:
        return document_key(namespace, PRINT, ids) in self.ledger.documents


def _pairs(arguments: dict[str, Any]) -> list[tuple[str, int]]:
    return list(zip(arguments["keys"], arguments["tokens"], strict=True))


def answer_to(ids: list[int], strategy: str) -> str:
    """The answer that every worker gives to these tokens."""
    return "".join(f" {strategy}{sum(ids) * place % 997}" for place in range(1, 5))


def sglang_app(ledger: Ledger) -> Starlette:
    """Stands where SGLang's app does: plans, documents and plain requests by ``/generate``."""

    async def generate(request: Request) -> StreamingResponse:
        return StreamingResponse(_stream(ledger, await request.json()), media_type="text/event-stream")

    async def abort(request: Request) -> JSONResponse:
        ledger.aborted.append((await request.json())["rid"])
        return JSONResponse({})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({})

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "owned_by": "sglang"}]})

    async def tokenize(_: Request) -> JSONResponse:
        return JSONResponse({"tokens": ledger.tokens}, 404 if ledger.tokens is None else 200)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/abort_request", abort, methods=["POST"]),
            Route("/v1/models", models),
        ]
    )


async def _stream(ledger: Ledger, body: dict[str, Any]) -> AsyncIterator[bytes]:
    rows = [body]
    if isinstance(body["rid"], list):
        rows = [
            {name: value[i] for name, value in body.items() if name != "stream"}
            for i in range(len(body["rid"]))
        ]
    for row in rows:
        async for out in _answer(ledger, row):
            yield f"data: {json.dumps(out)}\n\n".encode()
    yield b"data: [DONE]\n\n"


async def _answer(ledger: Ledger, row: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    ledger.keys.append(_KEY.get())
    if ledger.refusal is not None:
        raise ledger.refusal
    ids, strategy = row["input_ids"], "exact"
    text = row["sampling_params"].get("custom_params", {}).get(PLAN_FIELD)
    meta: dict[str, Any] = {
        "id": row["rid"],
        "cached_tokens": 0,
        "completion_tokens": 1,
        "finish_reason": None,
    }
    if text is not None:
        plan = ContextPlan.from_json(text, len(ids))
        if plan.operation == "document" and ids in ledger.bad:
            reason = {"type": "abort", "message": f"no {ids}", "status_code": 500}
            yield {"text": "", "meta_info": meta | {"finish_reason": reason}}
            return
        if plan.operation == "document":
            key = document_key(plan.namespace, PRINT, ids)
            ledger.prefilled.append(key)
            ledger.documents[key] = len(ids)
            yield {"text": "", "meta_info": meta | {"finish_reason": {"type": "length"}}}
            return
        keys = [document_key(plan.namespace, PRINT, ids[span.start : span.end]) for span in plan.spans]
        if missing := [number for number, key in enumerate(keys) if key not in ledger.documents]:
            message = f"{MISSING_PREFIX}{json.dumps(missing)}"
            reason = {"type": "abort", "message": message, "status_code": 400}
            yield {"text": "", "meta_info": meta | {"finish_reason": reason}}
            return
        strategy = plan.strategy
        tokens = plan.spans[-1].end - plan.spans[0].end
        report = ContextReport(strategy, tokens, tokens, 0, {"device": tokens}, 0.0, 0.0, 0.0)
        meta[PLAN_FIELD] = [report.to_json()]
    while not ledger.before_first.is_set():
        await asyncio.sleep(0.005)
    whole = answer_to(ids, strategy)
    pieces = whole.split(" ")[1:]
    for place in range(1, len(pieces) + 1):
        if last := place == len(pieces):
            ledger.answered.append(row)
        out = {
            "text": " " + " ".join(pieces[:place]),
            "output_ids": list(range(place)),
            "meta_info": meta
            | {"completion_tokens": place, "finish_reason": {"type": "stop"} if last else None},
        }
        yield out
        while not ledger.after_first.is_set():
            await asyncio.sleep(0.005)


class KillableServer:
    """An app on a port of its own that can be killed, and started again there."""

    def __init__(self) -> None:
        self._port = 0
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def serve(self, app: Any) -> None:
        held = hold_port(port=self._port)
        self._port = port_of(held)
        held.listen()
        config = uvicorn.Config(
            app,
            log_level="error",
            lifespan="on",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [held]}, daemon=True)
        self._thread.start()
        eventually(lambda: server.started, "a server's start")

    def kill(self) -> None:
        """End it as a kill does: connections break off and the port is closed."""
        server = self._server
        assert server is not None
        for connection in list(server.server_state.connections):
            transport: Any = connection.transport
            server.servers[0].get_loop().call_soon_threadsafe(transport.abort)
        self.stop()

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(240)
            self._server = None


class FakeWorker(KillableServer):
    """A worker that can be started, killed and started again on its port."""

    def __init__(self, data_dir: Path, **fields: Any) -> None:
        """Its name, by which documents get their owners, is the same in every run."""
        super().__init__()
        self.ledger = Ledger(data_dir)
        write_json(data_dir / "worker.json", {"id": f"{len(fields)} {data_dir.name}"})
        self._fields = fields

    def start(self) -> None:
        settings: Settings = load(data_dir=self.ledger.data_dir, api_key=KEY)
        sglang = sglang_app(self.ledger)

        @asynccontextmanager
        async def nothing() -> AsyncIterator[None]:
            yield

        engine = LedgerEngine(self.ledger, self._fields)
        app = create_worker_app(settings, engine, upstream=sglang, upstream_lifespan=nothing)

        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/generate":
                _KEY.set(Headers(scope=scope).get(ROUTING_KEY))
                self.ledger.peers.append(scope["client"])
            await app(scope, receive, send)

        self.serve(noted)


def run_on(make: Callable[[], E], work: Callable[[E], Awaitable[T]]) -> T:
    """Make an engine, start it, let ``work`` use it, and close it."""

    async def run() -> T:
        engine = make()
        try:
            await engine.start()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 240))


@contextmanager
def workers(folder: Path, count: int, **fields: Any) -> Iterator[list[FakeWorker]]:
    """Run workers until the block ends."""
    metrics()  # made once, before threads ask for it
    made = [FakeWorker(folder / f"worker-{number}", **fields) for number in range(count)]
    try:
        for each in made:
            each.start()
        yield made
    finally:
        for each in made:
            each.stop()


def request(number: int, strategy: str = "concat") -> GenerateRequest:
    """A question over two documents, which differ by ``number``."""
    ids = [*range(1, 5), *range(100 * number, 100 * number + 16), 7, 8]
    return GenerateRequest("asked", ids, "n", strategy, spans=(Span(0, 4), Span(4, 20)))


async def answered(engine: FleetEngine, number: int, strategy: str = "concat") -> None:
    """Ask the fleet, and check the answer."""
    asked = request(number, strategy)
    text = "".join([chunk.text async for chunk in engine.generate(asked)])
    assert text == answer_to(asked.input_ids, "concat" if strategy == "concat" else "exact")


async def until(engine: FleetEngine, routed: bool) -> None:
    """Wait until two workers are reached through the router, or directly."""
    async with asyncio.timeout(240):
        while [one["routed"] for one in engine.workers()] != [routed, routed]:
            await asyncio.sleep(0.01)
