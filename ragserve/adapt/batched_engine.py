"""Answers requests with the model that is to be adapted, in batches, so that questions are made without a
second copy of it in an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ragserve.adapt import greedy
from ragserve.adapt.packing import TrainingSequence
from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest

if TYPE_CHECKING:
    from ragserve.adapt.low_rank import AdaptedModel


class BatchedEngine:
    """Generates greedily; requests that wait together are answered together. Belongs to one event loop."""

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[list[int]]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Yield the whole answer as one chunk. Sampling but its length is not read: temperature is 0."""
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        ids = await answer
        ended = bool(ids) and ids[-1] in self._model.ends
        yield GenerateChunk(
            greedy.text_of(self._model, ids),
            EngineUsage(len(request.input_ids), 0, len(ids)),
            EngineTimings(),
            "stop" if ended else "length",
            output_ids=ids,
        )

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # lets those that are about to ask do so
            batch, self._waiting = self._waiting, []
            live = [(request, answer) for request, answer in batch if not answer.done()]
            prompts = [TrainingSequence(request.input_ids) for request, _ in live]
            longest = max((request.sampling.max_new_tokens for request, _ in live), default=0)
            try:
                found = await asyncio.to_thread(greedy.answers, self._model, prompts, longest)
            except asyncio.CancelledError:
                for _, answer in live:
                    answer.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - whoever asked raises it
                for _, answer in live:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (request, answer), ids in zip(live, found, strict=True):
                if not answer.done():
                    answer.set_result(ids[: request.sampling.max_new_tokens])
