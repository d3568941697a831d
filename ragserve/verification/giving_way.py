"""Engines that an idle server asks so that a request which arrives waits for little."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ragserve.engine.base import GenerateChunk, GenerateRequest


class Gently:
    """An engine whose documents are computed one at a time, so that a request waits for one at most."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def warm(self, request: GenerateRequest) -> None:
        for span in request.spans:
            await self._engine.warm(replace(request, spans=(span,)))


class GivingWay(Gently):
    """The same, where exact prefills, too, run in the background, in short chunks, unless they are ``timed``:
    then they are computed as those of users."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.timed = False

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        chunks: AsyncIterator[GenerateChunk] = self._engine.generate(
            replace(request, background=not self.timed)
        )
        return chunks
