"""Composed requests: documents that are not cached are prefilled first, each alone and once, in one batch;
then it is sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.engine.stream import DocumentsMissing, document_payload, payload
from sglang_ext.protocol import Span

log = logging.getLogger(__name__)

# documents can be evicted again before the request comes to them; after this many tries an exact strategy
# answers
ROUNDS = 3

Run = Callable[[dict[str, Any], int], AsyncGenerator[GenerateChunk, None]]
"""Sends one payload with a prompt of so many tokens to the engine and streams what comes."""

RunTogether = Callable[[Sequence[dict[str, Any]]], Awaitable[None]]
"""Sends several payloads at once and waits for their ends."""

_Name = tuple[str, bool, tuple[int, ...]]
"""Namespace, whether it is analysed, and token ids: what a prefill under way is known by. A query never waits
for one with an analysis.
"""


class Documents:
    """Prefills documents for the cache. Two requests that want the same document at once share one prefill."""

    def __init__(self, run: Run, run_together: RunTogether, new_rid: Callable[[str], str]) -> None:
        self._run = run
        self._run_together = run_together
        self._new_rid = new_rid
        self._running: dict[_Name, asyncio.Task[None]] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """A composed request to its end; falls back to strategy ``prefix``, and says so, when its documents
        do not stay cached.
        """
        for _ in range(ROUNDS):
            try:
                async with aclosing(
                    self._run(payload(request, self._new_rid(request.rid)), len(request.input_ids))
                ) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except DocumentsMissing as missing:  # always before the first chunk
                # Analysed when a request needs it: this one, perhaps, and then the engine does so before it
                # composes.
                await self.prefill(request, [request.spans[i] for i in missing.spans], analyse=False)
        reason = (
            f"its documents did not stay in the cache long enough, {ROUNDS} times: give the cache more memory"
        )
        log.warning("request %s is answered by strategy prefix: %s", request.rid, reason)
        exact = replace(request, strategy="prefix")
        async with aclosing(
            self._run(payload(exact, self._new_rid(request.rid)), len(request.input_ids))
        ) as chunks:
            async for chunk in chunks:
                yield replace(chunk, fallback=reason)

    async def prefill(self, request: GenerateRequest, spans: Sequence[Span], *, analyse: bool) -> None:
        """Compute these documents of a request, all in one batch, and leave them in every tier; ``analyse``:
        with their analyses.
        """
        wanted = {self._name(request, span, analyse): span for span in spans}
        new = {name: span for name, span in wanted.items() if name not in self._running}
        if new:
            task = asyncio.create_task(self._prefill(request, list(new.values()), analyse=analyse))
            self._running |= dict.fromkeys(new, task)
            task.add_done_callback(lambda _: [self._running.pop(name) for name in new])
        # Shielded: a client that leaves must not take a document away from the others that wait for it.
        await asyncio.gather(*(asyncio.shield(task) for task in {self._running[name] for name in wanted}))

    def _name(self, request: GenerateRequest, span: Span, analyse: bool) -> _Name:
        return request.namespace, analyse, tuple(request.input_ids[span.start : span.end])

    async def _prefill(self, request: GenerateRequest, spans: Sequence[Span], *, analyse: bool) -> None:
        name = f"{request.rid}-document"
        await self._run_together(
            [document_payload(request, span, self._new_rid(name), analyse=analyse) for span in spans]
        )
