"""Composed requests: prefill missing documents, each alone, in one batch; then send the request again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from ragserve.engine.base import EngineTimings, GenerateChunk, GenerateRequest
from ragserve.engine.later_analyses import LaterAnalyses
from ragserve.engine.stream import DocumentsMissing, document_payload, new_rid, payload
from ragserve.errors import InvalidRequest, RagserveError, Unavailable
from sglang_ext.sglang_internals.background_prefill import OwnChunk
from sglang_ext.wire.protocol import BACKGROUND_FIELD, EXACT_STRATEGIES, Span
from sglang_ext.wire.request_options import reads_sensitivity

log = logging.getLogger(__name__)

# Documents can be evicted before the request is scheduled; after this many tries an exact strategy answers.
ROUNDS = 3

Run = Callable[[dict[str, Any], int], AsyncGenerator[GenerateChunk, None]]
"""Sends one payload, given the prompt's tokens, and streams the answer."""

RunTogether = Callable[[Sequence[dict[str, Any]]], Coroutine[Any, Any, dict[str, RagserveError]]]
"""Sends several payloads at once, waits until all have ended, and returns the errors of those that failed, by
their ids. Raises an error that is of all."""

_Key = tuple[str, bool, bool, bool, tuple[int, ...]]
"""Key of a running prefill: namespace, analysed or not, lasting or not, system text or not, and token ids. A
query never waits for an analysis."""


class _NotKept(Exception):
    """The cache loses what a request needs as fast as it is computed."""


class Documents:
    """Prefills documents for the cache. Concurrent requests for the same document share one prefill."""

    def __init__(self, run: Run, run_together: RunTogether, *, background_chunk: int = 0) -> None:
        """``background_chunk``: tokens of a chunk of exact background requests; 0, as where the engine is
        reached over HTTP, leaves them like all others."""
        self._chunk = background_chunk
        self._run = run
        self._run_together = run_together
        self._running: dict[_Key, tuple[asyncio.Task[dict[str, RagserveError]], str]] = {}  # with its id
        self._later = LaterAnalyses(partial(self.prefill, analyse=True))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream a request. A composed one falls back to strategy ``prefix`` if its documents do not stay
        cached; ``GenerateChunk.fallback`` then gives the reason. Raises Unavailable where the engine does not
        take so large a prompt, as it may a context that is read on the host."""
        self._later.begin()
        try:
            made = self._send(request) if request.strategy in EXACT_STRATEGIES else self._kept(request)
            async with aclosing(made) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._later.end()

    def controlled(self, operation: str, arguments: Mapping[str, Any], fingerprint: str) -> None:
        """A control operation is about to run: analyse later nothing that it removes. ``fingerprint``: of the
        model."""
        if operation in ("remove", "remove_namespace", "clear"):
            self._later.forget(arguments.get("namespace"), arguments.get("keys"), fingerprint)

    def counted(self, stat: dict[str, Any]) -> dict[str, Any]:
        """Figures of the cache, with the number of analyses that wait for an idle moment."""
        if "analyses" not in stat:
            return stat
        return stat | {"analyses": stat["analyses"] | {"waiting": len(self._later)}}

    async def close(self) -> None:
        """Compute nothing more that nobody waits for."""
        await self._later.close()

    async def _kept(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        try:
            async with aclosing(self._composed(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except _NotKept as error:  # always before the first chunk
            reason = str(error)
        log.warning("request %s is answered by strategy prefix: %s", request.rid, reason)
        try:
            async with aclosing(self._send(replace(request, strategy="prefix"))) as chunks:
                async for chunk in chunks:
                    yield replace(chunk, fallback=reason)
        except InvalidRequest as error:  # all but its size was right as a composed one
            raise Unavailable(
                f"The request was not answered by {request.strategy}: {reason}. Nor by prefix: {error}",
                hint="Ask again, or with fewer documents.",
                code="documents_evicted",
            ) from error

    async def _composed(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a composed request, after computing what it lacks: documents and, of a session, the turns
        before it, each once. What is computed for it is not reported as held. Raises _NotKept."""
        reused: int | None = None  # tokens of a dialogue that had to be computed
        began, tokens, spent = time.perf_counter(), 0, 0.0
        for _ in range(ROUNDS):
            try:
                async with aclosing(self._send(request)) as chunks:
                    async for chunk in chunks:
                        if chunk.finish_reason and chunk.context and chunk.context.unknown_sensitivity:
                            self._later.add(request, chunk.context.unknown_sensitivity)
                        made = chunk if reused is None else _holding(chunk, reused)
                        yield replace(made, timings=_after(made.timings, tokens, spent)) if tokens else made
                return
            except DocumentsMissing as missing:  # always before the first chunk
                documents = [i for i in missing.spans if i or request.earlier is None]
                if request.earlier is not None and 0 in missing.spans:
                    if reused is not None:
                        raise _NotKept(
                            "its dialogue did not stay in the cache: give it more memory"
                        ) from None
                    reused = 0
                    async for chunk in self._composed(request.earlier()):
                        reused = chunk.context.session_held if chunk.context else reused
                # Not analysed: if this request needs analyses, the engine computes them before composing.
                lacking = [request.spans[i] for i in documents]
                await self.prefill(request, lacking, analyse=False)
                tokens += sum(span.end - span.start for span in lacking)
                spent = time.perf_counter() - began
                computed = tuple(sorted({*request.computed, *documents}))
                request = replace(request, computed=computed)
        raise _NotKept(f"its documents did not stay in the cache, {ROUNDS} times: give the cache more memory")

    def _send(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        fields = payload(request, new_rid(request.rid))
        if request.background and self._chunk:
            custom = fields["sampling_params"].setdefault("custom_params", {})
            custom[BACKGROUND_FIELD] = OwnChunk(self._chunk)
        return self._run(fields, len(request.input_ids))

    async def warm(self, request: GenerateRequest, *, analyse: bool) -> None:
        """Compute all documents of a request, with their analyses if ``analyse``, or if the rule of its
        strategy reads them: the request itself would go without, or wait."""
        analyse = analyse or reads_sensitivity(request.strategy, request.options)
        await self.prefill(request, request.spans, analyse=analyse)

    async def prefill(self, request: GenerateRequest, spans: Sequence[Span], *, analyse: bool) -> None:
        """Compute documents of a request in one batch and leave them in every tier, with their analyses if
        ``analyse``. Unregistered ones stay in memory. Raises the first error of one of them."""
        passing = {request.spans[number] for number in request.unregistered}
        wanted: dict[_Key, Span] = {
            (
                request.owner(span),
                analyse,
                span not in passing,
                request.system and span.start == 0,
                tuple(request.input_ids[span.start : span.end]),
            ): span
            for span in spans
        }
        if new := {key: new_rid(f"{request.rid}-document") for key in wanted if key not in self._running}:
            task = asyncio.create_task(
                self._run_together(
                    [
                        document_payload(request, wanted[key], rid, analyse=analyse, lasting=key[2])
                        for key, rid in new.items()
                    ]
                )
            )
            self._running |= {key: (task, rid) for key, rid in new.items()}
            task.add_done_callback(lambda _: [self._running.pop(key) for key in new])
        awaited = [self._running[key] for key in wanted]
        # Shielded: a client that leaves must not cancel a prefill that others wait for.
        await asyncio.gather(*(asyncio.shield(task) for task in {task for task, _ in awaited}))
        for task, rid in awaited:
            if rid in task.result():
                raise task.result()[rid]


def _after(timings: EngineTimings, tokens: int, seconds: float) -> EngineTimings:
    """The times of a request whose documents, ``tokens``, were computed before it was sent for good."""
    return replace(timings, documents_ms=seconds * 1e3, documents_tokens=tokens)


def _holding(chunk: GenerateChunk, reused: int) -> GenerateChunk:
    """The chunk of a request whose dialogue was computed for it, but for the first ``reused`` tokens. The
    engine has found all of it under the session's key."""
    report = chunk.context
    if report is None:
        return chunk
    computed = max(0, report.session_held - reused)
    return replace(
        chunk,
        usage=replace(chunk.usage, cached=max(0, chunk.usage.cached - computed)),
        context=replace(
            report,
            session_held=report.session_held - computed,
            session_computed=report.session_computed + computed,
        ),
    )
