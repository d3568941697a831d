"""Queries that are being answered, and whether there are any requests at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ragserve.errors import TooManyRequests
from ragserve.metrics import metrics
from sglang_ext.wire.protocol import Span


class LaidOut(Protocol):
    """A prompt: its token ids, and the spans of the system text and the documents."""

    @property
    def input_ids(self) -> list[int]: ...

    @property
    def spans(self) -> Sequence[Span]: ...


@dataclass(eq=False)
class InFlight:
    """A query in flight: its namespace, or the joint name of several, when it began (``time.time``), and its
    prompt when that is laid out."""

    namespace: str
    began: float
    prompt: LaidOut | None = None

    @property
    def documents(self) -> list[list[int]]:
        """Token ids of the documents in its prompt."""
        if self.prompt is None:
            return []
        return [self.prompt.input_ids[span.start : span.end] for span in self.prompt.spans[1:]]


class QueryLimiter:
    """Bounds the queries in flight over all routes. A query over the limit is refused at once, not queued.

    ``queries`` also holds prompts that the server computes by itself, which do not count."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0
        self.queries: set[InFlight] = set()

    @contextmanager
    def slot(self, namespace: str = "") -> Iterator[InFlight]:
        """Occupy a slot for the block. Raises TooManyRequests if none is free."""
        if self.in_flight >= self._limit:
            raise TooManyRequests(
                f"{self._limit} queries are already being answered.", hint="Retry in a moment."
            )
        self.in_flight += 1
        metrics().in_flight.inc()
        try:
            with self.background(namespace) as query:
                yield query
        finally:
            self.in_flight -= 1
            metrics().in_flight.dec()

    @contextmanager
    def background(self, namespace: str, prompt: LaidOut | None = None) -> Iterator[InFlight]:
        """Let removals know of a prompt of the server's own for the block."""
        query = InFlight(namespace, time.time(), prompt)
        self.queries.add(query)
        try:
            yield query
        finally:
            self.queries.discard(query)


class Idleness:
    """Says when no request of any route is being answered. Belongs to one event loop."""

    def __init__(self) -> None:
        self._requests = 0
        self._arrived = asyncio.Event()
        self._last = time.monotonic()

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is being answered while the block lasts."""
        self._requests += 1
        self._arrived.set()
        try:
            yield
        finally:
            self._requests -= 1
            self._last = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while there is one."""
        return 0.0 if self._requests else time.monotonic() - self._last

    async def arrival(self) -> None:
        """Wait for the next request, at most until one arrives that came since the last call."""
        self._arrived.clear()
        if not self._requests:
            await self._arrived.wait()
