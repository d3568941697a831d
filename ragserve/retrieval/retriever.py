"""Search by vectors, by words or by both, in threads, and embed concurrent questions in one batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from ragserve import tracing
from ragserve.errors import Conflict, ModelUnavailable, Unavailable
from ragserve.retrieval.evidence import DEPTH, Judgement, can_judge, judged, signals, words_of
from ragserve.retrieval.word_counts import word_counts
from ragserve.setting_groups.answering import Retrieval
from ragserve_index.types import Hit
from ragserve_index.viewers import EVERYTHING, Viewer
from sglang_ext.wire.joint_names import is_joint, names_of

if TYPE_CHECKING:
    from ragserve_index import IndexStore
    from ragserve_index.filters import Filter
    from ragserve_index.sentence_vectors import SentenceVectors
    from ragserve_index.types import Chunk, NamespaceInfo

_MAX_BATCH = 32
_SEARCH_THREADS = 2


@runtime_checkable
class RemoteQuestions(Protocol):
    """An embedder that answers questions itself, several at once: no thread is needed, no batch gathered."""

    async def questions(self, texts: list[str]) -> np.ndarray:
        """Embed questions. Float32 [len(texts), dim], L2-normalised. Raises ModelUnavailable."""
        ...

    async def close(self) -> None: ...


class QueryEmbedder(Protocol):
    """The query side of an embedder. Many models embed questions and documents differently."""

    name: str

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Embed questions. Float32 [len(texts), dim], L2-normalised."""
        ...


SentenceScores = list[tuple[int, float]]
"""First character of each embedded sentence in a chunk's text, and its cosine to the question."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Hits of one question, best first, read at ``version`` of the namespace, or at ``versions`` of several;
    milliseconds per stage, None for embedding in a lexical search.

    ``sentences``: the scores of each hit's sentences, empty where they were not asked for or not embedded.
    ``by_words_alone``: why a hybrid search was lexical; None where all was done that was asked for."""

    hits: list[Hit]
    version: int | None
    embed_ms: float | None
    search_ms: float
    sentences: list[SentenceScores] = field(default_factory=list)
    by_words_alone: str | None = None
    versions: Mapping[str, int] | None = None


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
        variants: Sequence[str] = (),
        filter: Filter | None = None,
        retrieval: Retrieval = "dense",
        sentences: bool = False,
        viewer: Viewer = EVERYTHING,
    ) -> Retrieved:
        """Find the ``k`` best passages that the viewer sees, of a namespace or, by their joint name, of
        several, or all if there are fewer: lexical finds only those that share a word with the question. With
        ``sentences``, score those of the passages, unless lexical.

        ``variants`` are wordings of the same question. A dense search takes the mean of their vectors, a
        lexical one the mean of their scores; the question counts as much as all variants together.

        Raises ``NotFound`` for an unknown namespace and, unless lexical, ``Conflict`` for one embedded with
        another model. Where a remote embedder does not answer, a hybrid search is lexical, and a dense one
        raises ``ModelUnavailable``."""
        start = time.perf_counter()
        vector = missing = None
        if retrieval != "lexical":
            with tracing.span("embed"):
                try:
                    vector = await self._mean(question, variants)
                except ModelUnavailable as error:
                    if retrieval == "dense":
                        raise
                    missing, sentences = error.message, False
        embedded = time.perf_counter()
        texts = () if retrieval == "dense" else (question, *variants)
        with tracing.span("search", **{"ragserve.namespace": namespace, "ragserve.retrieval": retrieval}):
            hits, versions, scores = await asyncio.get_running_loop().run_in_executor(
                self._search_threads,
                partial(self._search, self._store.seen_by(viewer)),
                namespace,
                texts,
                vector,
                k,
                filter,
                sentences,
            )
        done = time.perf_counter()
        embed_ms = None if vector is None else (embedded - start) * 1e3
        version, several = (None, versions) if is_joint(namespace) else (versions[namespace], None)
        return Retrieved(hits, version, embed_ms, (done - embedded) * 1e3, scores, missing, several)

    async def evidence(
        self,
        namespace: str,
        question: str,
        candidates: Sequence[Hit],
        retrieval: Retrieval,
        viewer: Viewer = EVERYTHING,
    ) -> Judgement | None:
        """Judge whether the best candidates answer; None of fewer than `DEPTH`, and for an embedder that
        there are no weights for."""
        if len(candidates) < DEPTH or not can_judge(self._embedder.name, retrieval):
            return None

        def judge() -> Judgement:
            store = self._store.seen_by(viewer)
            names = names_of(namespace)
            counts = word_counts(store, names, words_of(question))
            n_chunks = sum(store.namespace(name).n_chunks for name in names)
            found, missing = signals(candidates[:DEPTH], retrieval, counts, n_chunks)
            return judged(found, missing, self._embedder.name, retrieval)

        return await asyncio.get_running_loop().run_in_executor(self._search_threads, judge)

    async def around(
        self, namespace: str, chunk_ids: Sequence[int], n: int, viewer: Viewer = EVERYTHING
    ) -> dict[int, Chunk]:
        """See ``IndexStore.chunks_around``."""
        store = self._store.seen_by(viewer)

        def around() -> dict[int, Chunk]:
            found: dict[int, Chunk] = {}
            for name in names_of(namespace):
                found |= store.chunks_around(name, chunk_ids, n)
            return found

        return await asyncio.get_running_loop().run_in_executor(self._search_threads, around)

    async def hides(self, namespace: str, viewer: Viewer) -> bool:
        """See ``IndexStore.hides``."""
        if viewer.labels is None:  # waits for no search
            return False
        return await asyncio.get_running_loop().run_in_executor(
            self._search_threads, lambda: any(map(self._store.seen_by(viewer).hides, names_of(namespace)))
        )

    async def _mean(self, question: str, variants: Sequence[str]) -> np.ndarray:
        vector, *others = await asyncio.gather(*map(self.embed, (question, *variants)))
        if not others:
            return vector
        mean = len(others) * vector + np.sum(others, axis=0)
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), dtype=np.float32)

    async def embed(self, text: str) -> np.ndarray:
        """Embed a question to float32 [dim].

        Questions that arrive while a batch runs form the next batch, so a lone client never waits for
        others. Raises ModelUnavailable."""
        if isinstance(self._embedder, RemoteQuestions):
            return np.asarray((await self._embedder.questions([text]))[0])
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
        if isinstance(self._embedder, RemoteQuestions):
            await self._embedder.close()
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
        self,
        store: IndexStore,
        namespace: str,
        texts: tuple[str, ...],
        vector: np.ndarray | None,
        k: int,
        filter: Filter | None,
        sentences: bool,
    ) -> tuple[list[Hit], Mapping[str, int], list[SentenceScores]]:
        names = names_of(namespace)
        for name in names:
            self._check(store.namespace(name), vector)
        versions: Mapping[str, int]
        if len(names) > 1:
            text, variants = (texts[0], texts[1:]) if texts else (None, ())
            joint = store.search_several(names, k, text=text, variants=variants, vector=vector, filter=filter)
            hits, versions = joint.hits, joint.versions
        else:
            if vector is not None and not texts:
                result = store.search(namespace, vector[None, :], k, filter=filter)
            else:
                result = store.search_text(
                    namespace, texts[0], k, variants=texts[1:], vector=vector, filter=filter
                )
            hits, versions = result.hits[0], {namespace: result.version}
        if vector is None or not sentences:
            return hits, versions, [[] for _ in hits]
        return hits, versions, _sentence_scores(store, names, hits, vector)

    def _check(self, info: NamespaceInfo, vector: np.ndarray | None) -> None:
        """Raise Conflict for a namespace with vectors of another model than the question's."""
        if vector is not None and info.embedder != self._embedder.name:
            raise Conflict(
                f"Namespace {info.name!r} was embedded with {info.embedder!r}, "
                f"this server embeds with {self._embedder.name!r}.",
                hint="Start the server with that --embedder, or ingest the documents into another namespace.",
                code="embedder_mismatch",
            )
        if vector is not None and len(vector) != info.dim:  # a remote model may have become another
            raise Conflict(
                f"Namespace {info.name!r} has vectors of {info.dim} components, and {info.embedder!r} gives "
                f"{len(vector)} now.",
                hint="Another model answers by that name. Ingest the documents into another namespace.",
                code="embedder_mismatch",
            )


def _sentence_scores(
    store: IndexStore, names: Sequence[str], hits: list[Hit], vector: np.ndarray
) -> list[SentenceScores]:
    """Score the hits' sentences. A chunk removed since the search has none."""
    stored: dict[int, SentenceVectors] = {}
    for name in names:
        own = [hit.chunk.chunk_id for hit in hits if hit.chunk.namespace == name]
        stored |= store.sentence_vectors(name, own) if own else {}
    found: list[SentenceScores] = []
    for hit in hits:
        vectors = stored.get(hit.chunk.chunk_id)
        found.append([] if vectors is None else scored(vectors, vector))
    return found


def scored(sentences: SentenceVectors, vector: np.ndarray) -> SentenceScores:
    """The scores of a chunk's sentences for a question's ``vector`` [dim]."""
    return list(zip(sentences.starts.tolist(), sentences.scores(vector).tolist(), strict=True))
