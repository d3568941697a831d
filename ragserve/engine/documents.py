"""Composed requests: documents that are not cached are prefilled first, each alone and once, then the request is sent again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.engine.stream import DocumentsMissing, document_payload, payload
from sglang_ext.protocol import Span

log = logging.getLogger(__name__)

ROUNDS = 3  # documents can be evicted again before the request comes to them; after this many tries an exact strategy answers

Run = Callable[[dict[str, Any], int], AsyncGenerator[GenerateChunk, None]]
"""Sends one payload with a prompt of so many tokens to the engine and streams what comes."""


class Documents:
    """Prefills documents for the cache. Two requests that want the same document at once share one prefill."""

    def __init__(self, run: Run, new_rid: Callable[[str], str]) -> None:
        self._run = run
        self._new_rid = new_rid
        self._running: dict[tuple[str, tuple[int, ...]], asyncio.Task[None]] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """A composed request to its end; falls back to strategy ``prefix``, and says so, when its documents do not stay cached."""
        for _ in range(ROUNDS):
            try:
                async with aclosing(self._run(payload(request, self._new_rid(request.rid)), len(request.input_ids))) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except DocumentsMissing as missing:  # always before the first chunk
                await self.prefill(request, [request.spans[i] for i in missing.spans])
        reason = f"its documents did not stay in the cache long enough, {ROUNDS} times: give the cache more memory"
        log.warning("request %s is answered by strategy prefix: %s", request.rid, reason)
        exact = replace(request, strategy="prefix")
        async with aclosing(self._run(payload(exact, self._new_rid(request.rid)), len(request.input_ids))) as chunks:
            async for chunk in chunks:
                yield replace(chunk, fallback=reason)

    async def prefill(self, request: GenerateRequest, spans: list[Span]) -> None:
        """Compute these documents of a request and leave them in every tier."""
        tasks = [self._task(request, span) for span in spans]
        # Shielded: a client that leaves must not take a document away from the others that wait for it.
        await asyncio.gather(*(asyncio.shield(task) for task in tasks))

    def _task(self, request: GenerateRequest, span: Span) -> asyncio.Task[None]:
        key = (request.namespace, tuple(request.input_ids[span.start : span.end]))
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._prefill(request, span))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return task

    async def _prefill(self, request: GenerateRequest, span: Span) -> None:
        rid = self._new_rid(f"{request.rid}-document")
        async with aclosing(self._run(document_payload(request, span, rid), span.end - span.start)) as chunks:
            async for _ in chunks:
                pass
