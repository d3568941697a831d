"""Search for the passages of a prompt: candidates, without copies, reranked, above a floor, as many as fit,
with their neighbours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragserve import tracing
from ragserve.errors import InvalidRequest, ModelUnavailable
from ragserve.retrieval.evidence import DEPTH
from ragserve.retrieval.near_copies import without_copies
from ragserve.retrieval.search_options import OFF, SearchOptions

if TYPE_CHECKING:
    from ragserve.retrieval.evidence import Judgement
    from ragserve.retrieval.reranker import Reranker
    from ragserve.retrieval.retriever import Retrieved, Retriever, SentenceScores
    from ragserve_index.types import Chunk
    from ragserve_index.viewers import Viewer

_RANK_OFFSET = 60  # of reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009), not tuned


@dataclass(frozen=True, slots=True)
class FoundPassage:
    """A chunk with its scores, as in `ragserve_index.types.Hit`; a neighbour has none.

    ``search_rank``: its place among the candidates, from 1, and ``rerank_score``, if they were reranked."""

    chunk: Chunk
    score: float | None = None
    cosine: float | None = None
    bm25: float | None = None
    search_rank: int | None = None
    rerank_score: float | None = None


@dataclass(frozen=True, slots=True)
class FoundPassages:
    """Passages in the order of a prompt, read at ``version`` of the namespace, or at ``versions`` of several,
    with the scores of their sentences.

    ``reranked``: all candidates in their new order; None without a reranker. Milliseconds per stage, None
    for one that did not run.
    ``evidence``: whether they seem to answer; None where that was not asked, or cannot be said.
    ``by_words_alone``: see `Retrieved`. ``not_reranked``: why a remote reranker gave no scores."""

    passages: list[FoundPassage]
    sentences: list[SentenceScores]
    version: int | None
    reranked: list[FoundPassage] | None
    embed_ms: float | None
    search_ms: float
    rerank_ms: float | None
    evidence: Judgement | None = None
    by_words_alone: str | None = None
    not_reranked: str | None = None
    versions: Mapping[str, int] | None = None


class PassageSearch:
    """Searches with one retriever and the rerankers of a server, by name. Belongs to one event loop."""

    def __init__(self, retriever: Retriever, rerankers: Mapping[str, Reranker] | None = None) -> None:
        self._retriever = retriever
        self._rerankers = rerankers or {}

    async def search(
        self,
        namespace: str,
        question: str,
        options: SearchOptions,
        *,
        variants: Sequence[str] = (),
        sentences: bool = False,
    ) -> FoundPassages:
        """Find passages; ``variants`` and ``sentences`` as in `Retriever.retrieve`.

        A reranker reads the first variant, if there are some: the question after the turn before it. Raises
        InvalidRequest for an unknown reranker, and as `Retriever.retrieve`. Where a remote reranker does not
        answer, the search's order stays, and without a remote embedder a hybrid search is lexical; with a
        floor about the scores that are missing then, ModelUnavailable is raised."""
        reranker = self._reranker(options.rerank)
        judges = options.not_found != "off" and not variants  # else the question is more than its words
        found = await self._retriever.retrieve(
            namespace,
            question,
            max(options.depth, DEPTH) if judges else options.depth,
            variants=variants,
            filter=options.filter,
            retrieval=options.retrieval,
            sentences=sentences,
            viewer=options.viewer,
        )
        by_reranker = reranker is not None and reranker.comparable
        if options.min_score is not None and found.by_words_alone is not None and not by_reranker:
            raise ModelUnavailable(
                found.by_words_alone,
                hint="min_score is about cosines; leave it out to search by words alone.",
                code="embedder_unavailable",
            )
        started = time.perf_counter()
        evidence = None
        if judges:
            by = options.retrieval if found.by_words_alone is None else "lexical"
            evidence = await self._retriever.evidence(namespace, question, found.hits, by, options.viewer)
        judge_ms = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        passages = (await self._candidates(found, options))[: options.depth]
        reranked = rerank_ms = not_reranked = None
        if reranker is not None:
            asked = variants[0] if variants else question
            scores: Sequence[float | None]
            with tracing.span("rerank"):
                try:
                    scores = await reranker.scores(namespace, asked, [each.chunk for each in passages])
                except ModelUnavailable as error:
                    if options.min_score is not None:
                        raise
                    scores, not_reranked = [None] * len(passages), error.message
            passages = reranked = reordered(passages, scores, fuse=not reranker.comparable)
            rerank_ms = (time.perf_counter() - started) * 1e3
        if options.min_score is not None:
            passages = [p for p in passages if _floor_score(p, options, by_reranker) >= options.min_score]
        around: dict[int, Chunk] = {}
        if options.neighbours:
            best = [each.chunk.chunk_id for each in passages[: options.k]]
            around = await self._retriever.around(namespace, best, options.neighbours, options.viewer)
        chosen = fitting(passages[: options.k], around, options)
        by_id = {hit.chunk.chunk_id: own for hit, own in zip(found.hits, found.sentences, strict=True)}
        return FoundPassages(
            chosen,
            [by_id.get(each.chunk.chunk_id, []) for each in chosen],
            found.version,
            reranked,
            found.embed_ms,
            found.search_ms + judge_ms,
            rerank_ms,
            evidence,
            found.by_words_alone,
            not_reranked,
            found.versions,
        )

    async def hides(self, namespace: str, viewer: Viewer) -> bool:
        """See ``IndexStore.hides``."""
        return await self._retriever.hides(namespace, viewer)

    async def _candidates(self, found: Retrieved, options: SearchOptions) -> list[FoundPassage]:
        passages = [FoundPassage(hit.chunk, hit.score, hit.cosine, hit.bm25) for hit in found.hits]
        if not options.dedupe:
            return passages
        texts = [each.chunk.text for each in passages]
        kept = await asyncio.to_thread(without_copies, texts, options.dedupe)
        return [passages[place] for place in kept]

    def _reranker(self, name: str) -> Reranker | None:
        if name == OFF:
            return None
        if name not in self._rerankers:
            known = [OFF, *self._rerankers]
            raise InvalidRequest(
                f"This server has no reranker {name!r:.200}.",
                hint=f"One of: {', '.join(known)}. Others need the setting rerank_models.",
                code="reranker_not_found",
                param="rerank",
            )
        return self._rerankers[name]


def reordered(
    passages: Sequence[FoundPassage], scores: Sequence[float | None], *, fuse: bool = False
) -> list[FoundPassage]:
    """Order the passages by their scores, equal ones as they were; with ``fuse``, by reciprocal rank in both
    orders, the old and that of the scores. A passage without a score keeps its place."""
    ranked = [
        replace(passage, search_rank=rank, rerank_score=score)
        for rank, (passage, score) in enumerate(zip(passages, scores, strict=True), 1)
    ]
    scored = [each for each in ranked if each.rerank_score is not None]
    by_score = sorted(scored, key=lambda each: -(each.rerank_score or 0.0))
    if fuse:
        weight: dict[int | None, float] = {}
        for ranking in (scored, by_score):
            for rank, each in enumerate(ranking, 1):
                weight[each.search_rank] = weight.get(each.search_rank, 0.0) + 1 / (_RANK_OFFSET + rank)
        by_score = sorted(scored, key=lambda each: -weight[each.search_rank])
    best = iter(by_score)
    return [each if each.rerank_score is None else next(best) for each in ranked]


def fitting(
    passages: Sequence[FoundPassage], around: Mapping[int, Chunk], options: SearchOptions
) -> list[FoundPassage]:
    """As many of the passages, best first, as ``context_tokens`` allows, each among its neighbours in the
    order of the text.

    Passages near each other are one group, which stands where its best one does. The first passage that does
    not fit with its neighbours ends the list; the very best stays in any case, then without them."""
    groups: list[dict[int, FoundPassage]] = []
    room = options.context_tokens or float("inf")
    for passage in passages:
        window = _window(passage, around, options.neighbours)
        near = [each for each in groups if _adjoins(each, window)] if options.neighbours else []
        known = {i for each in near for i in each}
        added = {i: each for i, each in window.items() if i not in known}
        cost = sum(each.chunk.n_tokens for each in added.values())
        if cost > room:
            if groups:
                break
            added = {passage.chunk.chunk_id: passage}
            cost = passage.chunk.n_tokens
        room -= cost
        if not near:
            near = [{}]
            groups += near
        group, *others = near  # a window between two groups makes them one
        for other in others:
            group |= other
            groups.remove(other)
        group |= added | {passage.chunk.chunk_id: passage}
    return [each for group in groups for _, each in sorted(group.items())]


def _window(passage: FoundPassage, around: Mapping[int, Chunk], n: int) -> dict[int, FoundPassage]:
    own = passage.chunk
    ids = [i for i in range(own.chunk_id - n, own.chunk_id + n + 1) if i in around]
    near = {i: FoundPassage(around[i]) for i in ids if around[i].doc_id == own.doc_id}
    return near | {own.chunk_id: passage}


def _adjoins(group: Mapping[int, FoundPassage], window: Mapping[int, FoundPassage]) -> bool:
    """Whether both are of one document, without a gap between them."""
    one, other = next(iter(group.values())).chunk, next(iter(window.values())).chunk
    return one.doc_id == other.doc_id and any({i - 1, i, i + 1} & group.keys() for i in window)


def _floor_score(passage: FoundPassage, options: SearchOptions, by_reranker: bool) -> float:
    """The score that ``min_score`` is about."""
    if by_reranker:
        score = passage.rerank_score
    else:
        score = passage.bm25 if options.retrieval == "lexical" else passage.cosine
    return float("-inf") if score is None else score
