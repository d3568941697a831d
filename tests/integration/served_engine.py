"""The engine of a server that tests share, for commands that otherwise start one in their own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import ControlledCache
from ragserve.engine.prefill import Documents
from ragserve.engine.remote import RemoteEngine
from ragserve.errors import RagserveError
from sglang_ext.documents.fingerprint import model_fingerprint
from tests.integration.engines import Server

T = TypeVar("T")


class ServedEngine(ControlledCache, RemoteEngine):
    """The engine of a server with control routes, by SGLang's own ones. It has no samkv profile."""

    async def start(self) -> EngineInfo:
        await super().start()
        found = await self.control("info")
        self._fingerprint = found["fingerprint"]
        self._info = replace(
            self.info,
            strategies=(*self.info.strategies, *found["strategies"]),
            fingerprint=model_fingerprint(self.info.model, ""),
            only_exact=found["unsupported"],
            dtype="float32",
            samkv="",
        )
        return self._info

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """As the engine of a process: documents that are not cached are computed first."""
        return Documents(self._run, self._run_together).generate(request)

    async def warm(self, request: GenerateRequest) -> None:
        await Documents(self._run, self._run_together).prefill(request, request.spans, analyse=True)

    async def _run_together(self, requests: Sequence[dict[str, Any]]) -> dict[str, RagserveError]:
        for fields in requests:
            async for _ in self._run(fields | {"stream": True}, 0):
                pass
        return {}

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        while True:
            async with self._request("POST", "/dumper/ragserve", {"op": operation, **arguments}) as answer:
                assert answer.ok, await answer.text()
                found = dict((await answer.json())[0])
            if "pending" not in found:
                return found
            arguments["pending"] = found["pending"]
            await asyncio.sleep(0.02)


def on(server: Server, work: Callable[[Any], Awaitable[T]], context_length: int | None = None) -> T:
    """Await ``work(engine)`` on a server's engine, which says to have ``context_length`` if that is given."""

    async def run() -> T:
        engine = ServedEngine(Settings(engine_url=server.url))
        try:
            await engine.start()
            if context_length is not None:
                engine._info = replace(engine.info, context_length=context_length)
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())
