"""Search by vectors, by words or by both, in threads, and embed concurrent questions in one batch."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ragserve.config import Retrieval
from ragserve.errors import Conflict, Unavailable
from ragserve_index.types import Hit

if TYPE_CHECKING:
    from ragserve_index import IndexStore
    from ragserve_index.filters import Filter

_MAX_BATCH = 32
_SEARCH_THREADS = 2


class QueryEmbedder(Protocol):
    """The query side of an embedder. Many models embed questions and documents differently."""

    name: str

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Embed questions. Float32 [len(texts), dim], L2-normalised."""
        ...


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Hits of one question, best first, read at ``version`` of the namespace; milliseconds per stage, None
    for embedding in a lexical search."""

    hits: list[Hit]
    version: int
    embed_ms: float | None
    search_ms: float


class Retriever:
    """Belongs to one event loop. ``close`` waits for the threads."""

    def __init__(self, store: IndexStore, embedder: QueryEmbedder) -> None:
        self._store = store
        self._embedder = embedder
        self._embed_thread = ThreadPoolExecutor(1, thread_name_prefix="embed-query")
        self._search_threads = ThreadPoolExecutor(_SEARCH_THREADS, thread_name_prefix="search")
        self._waiting: list[tuple[str, asyncio.Future[np.ndarray]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def retrieve(
        self,
        namespace: str,
        question: str,
        k: int,
        *,
        filter: Filter | None = None,
        retrieval: Retrieval = "dense",
    ) -> Retrieved:
        """Find the ``k`` best passages, or all if there are fewer: lexical finds only those that share a word
        with the question.

        Raises ``NotFound`` for an unknown namespace and, unless lexical, ``Conflict`` for one embedded with
        another model."""
        start = time.perf_counter()
        vector = None if retrieval == "lexical" else await self.embed(question)
        embedded = time.perf_counter()
        text = None if retrieval == "dense" else question
        hits, version = await asyncio.get_running_loop().run_in_executor(
            self._search_threads, self._search, namespace, text, vector, k, filter
        )
        done = time.perf_counter()
        embed_ms = None if vector is None else (embedded - start) * 1e3
        return Retrieved(hits, version, embed_ms, search_ms=(done - embedded) * 1e3)

    async def embed(self, text: str) -> np.ndarray:
        """Embed a question to float32 [dim].

        Questions that arrive while a batch runs form the next batch, so a lone client never waits for
        others."""
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._embed_waiting())
        return await future

    async def close(self) -> None:
        """Fail the waiting questions and stop the threads."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for pool in (self._embed_thread, self._search_threads):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    async def _embed_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        batch: list[tuple[str, asyncio.Future[np.ndarray]]] = []
        try:
            while self._waiting:
                # clients that left while waiting are not embedded
                batch = [(text, future) for text, future in self._waiting[:_MAX_BATCH] if not future.done()]
                del self._waiting[:_MAX_BATCH]
                if not batch:
                    continue
                try:
                    vectors = await loop.run_in_executor(
                        self._embed_thread, self._embedder.encode_queries, [text for text, _ in batch]
                    )
                except Exception as error:  # noqa: BLE001 - handed to the callers
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                else:
                    for (_, future), vector in zip(batch, vectors, strict=True):
                        if not future.done():
                            future.set_result(vector)
        finally:  # closing: nobody waits forever
            for _, future in [*batch, *self._waiting]:
                if not future.done():
                    future.set_exception(Unavailable("The server is shutting down.", hint="Retry."))

    def _search(
        self, namespace: str, text: str | None, vector: np.ndarray | None, k: int, filter: Filter | None
    ) -> tuple[list[Hit], int]:
        info = self._store.namespace(namespace)
        if vector is not None and info.embedder != self._embedder.name:
            raise Conflict(
                f"Namespace {namespace!r} was embedded with {info.embedder!r}, "
                f"this server embeds with {self._embedder.name!r}.",
                hint="Start the server with that --embedder, or ingest the documents into another namespace.",
                code="embedder_mismatch",
            )
        if text is None and vector is not None:
            result = self._store.search(namespace, vector[None, :], k, filter=filter)
        else:
            result = self._store.search_text(namespace, text or "", k, vector=vector, filter=filter)
        return result.hits[0], result.version
