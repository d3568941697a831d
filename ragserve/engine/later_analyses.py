"""Analyses of documents that questions did without, computed while no request is being answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ragserve.engine.base import GenerateRequest
from ragserve.errors import RagserveError
from sglang_ext.wire.protocol import Span, document_key

log = logging.getLogger(__name__)
QUIET_S = 1.0  # without a request before the next document is analysed
_MOST = 512  # documents that wait; the oldest is forgotten, until a question does without its analysis again
# A document is analysed in one scheduler step, for which requests wait. Longer ones are analysed, in many
# steps, for a query whose rule reads nothing else; rule sentences does without.
_LONGEST = 4096

Analyse = Callable[[GenerateRequest, Sequence[Span]], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Waiting:
    """A document that waits: whether it lasts, and its key once that was compared with removed ones."""

    lasting: bool
    key: str = ""


class LaterAnalyses:
    """Waits for idle moments, and analyses the newest documents first. On the event loop."""

    def __init__(self, analyse: Analyse) -> None:
        self._analyse = analyse
        self._wanted: OrderedDict[tuple[str, tuple[int, ...]], _Waiting] = OrderedDict()
        self._requests = 0
        self._analysing = False
        self._last = 0.0  # when a request has ended
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Documents that wait, and the one that is being analysed."""
        return len(self._wanted) + self._analysing

    def begin(self) -> None:
        """A request is being answered."""
        self._requests += 1

    def end(self) -> None:
        """A request has ended."""
        self._requests -= 1
        self._last = time.monotonic()

    def add(self, request: GenerateRequest, spans: Sequence[int]) -> None:
        """Note documents of a request, by the numbers of their spans."""
        for number in spans:
            span = request.spans[number]
            if span.end - span.start > _LONGEST:
                continue
            document = (request.owner(span), tuple(request.input_ids[span.start : span.end]))
            self._wanted[document] = _Waiting(number not in request.unregistered)
            self._wanted.move_to_end(document)
        while len(self._wanted) > _MOST:
            self._wanted.popitem(last=False)
        if self._wanted and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    def forget(self, namespace: str | None, keys: Collection[str] | None, fingerprint: str) -> None:
        """Drop the documents of a ``namespace`` (None: of all), or those with ``keys``: they are being
        removed, and an analysis would compute their KV again. ``fingerprint``: of the model, as in keys."""
        gone = None if keys is None else set(keys)
        for (owner, ids), waiting in list(self._wanted.items()):
            if namespace not in (None, owner):
                continue
            if gone is not None:
                # kept: removals come in many parts, and hashing takes time
                waiting.key = waiting.key or document_key(owner, fingerprint, ids)
                if waiting.key not in gone:
                    continue
            del self._wanted[owner, ids]

    async def close(self) -> None:
        """Stop; what is being computed is not waited for."""
        self._wanted.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._wanted:
            if self._requests or time.monotonic() - self._last < QUIET_S:
                await asyncio.sleep(QUIET_S)
                continue
            (namespace, ids), waiting = self._wanted.popitem()
            whole = Span(0, len(ids))
            request = GenerateRequest(
                "analysis",
                list(ids),
                namespace,
                spans=(whole,),
                unregistered=() if waiting.lasting else (0,),
                system=False,
            )
            self._analysing = True
            try:
                await self._analyse(request, [whole])
            except RagserveError as error:
                log.debug("a document was not analysed: %s", error)
            finally:
                self._analysing = False
