"""A router on a real socket: keys to workers by a table of its own, and the faults that a router may have."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ragserve.fleet.routing_key import MARK, ROUTING_KEY
from tests.unit.fleet.fake_worker import KillableServer

Pieces = asyncio.Queue[httpx.Response | bytes | httpx.HTTPError | None]
PASSED = {"authorization", "content-type", ROUTING_KEY, MARK}


class ScriptedRouter(KillableServer):
    """Stands where `smg` does. ``carried`` are the keys of requests, ``asked`` those of questions.

    ``fault``: ``drops`` (custom_params), ``keeps`` (answers until they are complete), ``stays`` (reads on
    when its reader has left), ``unsteady``, ``full`` (429) or ``fails`` (500 to requests)."""

    def __init__(self, urls: list[str], fault: str = "") -> None:
        super().__init__()
        self.urls = urls
        self.fault = fault
        self.shift = 0  # of the ring
        self.carried: list[str] = []
        self.asked: list[str] = []
        self._reading: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self.serve(Starlette(routes=[Route("/generate", self._generate, methods=["POST"])]))

    async def _generate(self, request: Request) -> Response:
        key, body = request.headers[ROUTING_KEY], await request.json()
        (self.asked if MARK in request.headers else self.carried).append(key)
        if MARK not in request.headers and self.fault in ("full", "fails"):
            return JSONResponse({"error": self.fault}, 429 if self.fault == "full" else 500)
        if self.fault == "drops":
            body["sampling_params"].pop("custom_params", None)
        headers = {name: value for name, value in request.headers.items() if name in PASSED}
        pieces: Pieces = asyncio.Queue()
        task = asyncio.create_task(self._read(f"{self._of(key)}/generate", body, headers, pieces))
        self._reading.add(task)
        begin = await pieces.get()
        if isinstance(begin, httpx.HTTPError):
            return JSONResponse({"error": repr(begin)}, 500)
        assert isinstance(begin, httpx.Response)
        names = {"x-ragserve-worker", "content-type"} & begin.headers.keys()
        kept = {name: begin.headers[name] for name in names}
        answer = self._pieces(task, pieces)
        if self.fault == "keeps" or "event-stream" not in kept.get("content-type", ""):
            return Response(b"".join([piece async for piece in answer]), begin.status_code, kept)
        return StreamingResponse(answer, begin.status_code, kept)

    async def _read(self, url: str, body: Any, headers: dict[str, str], pieces: Pieces) -> None:
        """Put the answer, its pieces, and None or the error that ended it."""
        try:
            async with (
                httpx.AsyncClient(verify=False, timeout=60) as client,  # a new one: no connection stays open
                client.stream("POST", url, json=body, headers=headers) as answer,
            ):
                pieces.put_nowait(answer)
                async for piece in answer.aiter_raw():
                    pieces.put_nowait(piece)
            pieces.put_nowait(None)
        except httpx.HTTPError as error:
            pieces.put_nowait(error)

    async def _pieces(self, task: asyncio.Task[None], pieces: Pieces) -> AsyncIterator[bytes]:
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, httpx.HTTPError):
                    raise piece  # the answer breaks off, too
                assert isinstance(piece, bytes)
                yield piece
        finally:
            if self.fault != "stays":
                task.cancel()

    def _of(self, key: str) -> str:
        unsteady = len(self.asked) if self.fault == "unsteady" else 0
        return self.urls[(zlib.crc32(key.encode()) + self.shift + unsteady) % len(self.urls)]


def workers_of(keys: list[str]) -> list[str]:
    """The workers that keys are for, once each."""
    return sorted({key.rpartition("/")[0] for key in keys})


def plan_of(row: dict[str, Any]) -> Any:
    """The plan in a request as a worker got it."""
    return json.loads(row["sampling_params"]["custom_params"]["ragserve"])
