"""Run work of a server's own while no request is being answered, and stop it when one arrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ragserve.answering.in_flight import Idleness

log = logging.getLogger(__name__)
QUIET_S = 1.0  # without a request, before work begins
_POLL_S = 0.25
_AFTER_ERROR_S = 60.0
Work = Callable[[], Coroutine[Any, Any, None] | None]
"""Gives the next piece of work, None if there is none now. A piece that is cancelled must leave nothing half
done, and may be given again."""


class IdleWorker:
    """Takes the next piece of the first source that has one. One piece runs at a time."""

    def __init__(self, idleness: Idleness, sources: Sequence[Work]) -> None:
        self._idleness = idleness
        self._sources = sources

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work while the block lasts."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                work = self._next() if self._idleness.idle_s >= QUIET_S else None
                if work is None:
                    await asyncio.sleep(_POLL_S)
                    continue
                await self._until_arrival(work)
            except Exception:
                log.exception("work of an idle server failed; it goes on in %g s", _AFTER_ERROR_S)
                await asyncio.sleep(_AFTER_ERROR_S)

    def _next(self) -> Coroutine[Any, Any, None] | None:
        return next((work for source in self._sources if (work := source()) is not None), None)

    async def _until_arrival(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` to its end, or cancel it at the next request. Raises what it raises."""
        running, arrival = asyncio.create_task(work), asyncio.create_task(self._idleness.arrival())
        try:
            await asyncio.wait((running, arrival), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped = running.cancel()
            arrival.cancel()
            await asyncio.gather(running, arrival, return_exceptions=True)
        if not stopped:
            running.result()
