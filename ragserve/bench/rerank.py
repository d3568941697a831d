"""Quality and time of rerankers beside no reranking: the first 5 of the 50 best passages of a search, and
what the serving model answers with them. Without reranking, each kind of search is measured; rerankers are
given the passages of the server's default search.

Searched are collections in BEIR's layout, or question sets as for `ragserve eval`, which have answers. The
passages of the chosen questions of such a set are one collection. Runs the engine in this process group. Of
a collection only the candidates of its questions are analysed."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ragserve.answering.key_reranker import KeyReranker
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.bench import beir
from ragserve.bench.retrieval import document_of
from ragserve.bench.retrieval_trace import warm_missing
from ragserve.config import Settings, load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import InvalidRequest
from ragserve.eval import data as question_sets
from ragserve.eval.ir_metrics import ndcg, recall
from ragserve.retrieval.passage_search import FoundPassages, PassageSearch
from ragserve.retrieval.reranker import CrossEncoderReranker, Reranker
from ragserve.retrieval.retriever import Retriever
from ragserve.retrieval.search_options import KEYS, OFF, SearchOptions
from ragserve.setting_groups.answering import Retrieval
from ragserve.verification.engine_run import first_token
from ragserve.verification.metrics import exact_match, token_f1
from ragserve.verification.report import GrowingReport, percentile

if TYPE_CHECKING:
    from ragserve.retrieval.embedder import AnyEmbedder
    from ragserve_index import IndexStore
    from ragserve_index.types import Chunk

_K, _CANDIDATES = 5, 50
_BATCH = 256
_ANSWER_TOKENS = 24
_IN_FLIGHT = 4
_NOTE = (
    "ms: scoring the candidates of one question at a time, their analyses in memory; the question's pass "
    "included, its search not. f1, em: greedy answers from the first 5, of sets with answers. nDCG: linear "
    "gain. Only candidates are analysed, once, before the measurement."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A collection, and the accepted answers of its queries, empty where it has none."""

    collection: beir.Collection
    answers: Mapping[str, tuple[str, ...]]


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    data: Sequence[Path] = (),
    questions: int = 0,
    rerankers: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure no reranking, `keys` and CrossEncoders (``rerankers``, by name) per collection; the JSON is
    rewritten after each row. ``questions``: spread over each collection; 0: all, or 10 with ``quick``.

    Raises InvalidRequest without ``data``, for two collections of one name, or for a reranker that is not
    there."""
    from ragserve.engine.offline import run_once
    from ragserve.retrieval.embedder import Embedder

    if not data:
        raise InvalidRequest(
            "bench rerank needs collections to search.",
            hint="Give --data DIR, a folder in BEIR's layout, or --data FILE, a question set as for "
            "`ragserve eval`; more than once for several.",
        )
    sets = [read(path, questions or (10 if quick else 0)) for path in data]
    names = [each.collection.name for each in sets]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidRequest(
            f"Two collections have the same name, {min(twice)!r}.", hint="Rename the folder or file of one."
        )
    report = GrowingReport("rerank", out_dir / "rerank.json" if out_dir else None, note=_NOTE)
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder:
        settings = load(data_dir=Path(folder), kv_disk_bytes=0, kv_storage="file")
        named: dict[str, Reranker] = {
            name: CrossEncoderReranker(name, device=settings.embed_device, batch_size=settings.embed_batch)
            for name in rerankers
        }

        async def work(engine: Any) -> None:
            report.workload = {
                "model": Path(engine.info.model).name,
                "embedder": settings.embedder,
                "candidates": _CANDIDATES,
                "k": _K,
            }
            embedder = Embedder.of(settings)
            try:
                for asked in sets:
                    await measure(asked, engine, embedder, settings, named, report)
            finally:
                await asyncio.gather(*(reranker.close() for reranker in named.values()))

        run_once(settings, work)
    return report.show()


def read(path: Path, count: int) -> Asked:
    """Read a collection or a question set, with ``count`` of its questions; 0: all.

    Raises InvalidRequest for a file that is neither, or a set without a passage that holds an answer."""
    if path.is_dir():
        whole = beir.load(path)
        step = max(1, len(whole.queries) // count) if count else 1
        names = list(whole.queries)[::step][: count or None]
        return Asked(replace(whole, queries={name: whole.queries[name] for name in names}), {})
    chosen = [each for each in question_sets.load(path, count or None) if each.gold]
    if not chosen:
        raise InvalidRequest(f"{path}: no question has a passage with its answer.")
    documents = {p.key: (p.title, p.text) for p in question_sets.distinct_passages(chosen)}
    judged = {each.id: {passage.key: 1 for passage in each.gold} for each in chosen}
    queries = {each.id: each.question for each in chosen}
    collection = beir.Collection(question_sets.set_name(path), documents, queries, judged)
    return Asked(collection, {each.id: each.answers for each in chosen})


async def measure(
    asked: Asked,
    engine: Any,
    embedder: AnyEmbedder,
    settings: Settings,
    named: Mapping[str, Reranker],
    report: GrowingReport,
) -> None:
    """Search a collection with each reranker, and add a row for each to the report."""
    from ragserve_index import IndexStore

    collection = asked.collection
    prompts = PromptBuilder.load(engine.info.tokenizer)
    with IndexStore(settings.data_dir / collection.name) as store:
        _write(store, collection, embedder)
        retriever = Retriever(store, embedder)
        search = PassageSearch(retriever, {KEYS: KeyReranker(engine, prompts), **named})
        try:
            chunks: dict[int, Chunk] = {}
            for retrieval in get_args(Retrieval):
                found = await _searched(collection, search, retrieval, OFF)
                report.add(await _row(asked, engine, prompts, retrieval, OFF, found))
                if retrieval == settings.retrieval:
                    chunks = {p.chunk.chunk_id: p.chunk for each in found for p in each.passages}
            ids = [prompts.document_ids(chunk.title, chunk.text) for chunk in chunks.values()]
            await warm_missing(engine, collection.name, ids)
            for name in (KEYS, *named):
                found = await _searched(collection, search, settings.retrieval, name)
                if any(p.rerank_score is None for each in found for p in each.passages):
                    raise InvalidRequest(
                        "Some candidates have no analysis: the cache has no room for them.",
                        hint="Raise RAGSERVE_KV_HOST_BYTES, or take fewer --questions.",
                    )
                report.add(await _row(asked, engine, prompts, settings.retrieval, name, found))
        finally:
            await retriever.close()


def _write(store: IndexStore, collection: beir.Collection, embedder: AnyEmbedder) -> None:
    store.ensure_namespace(collection.name, embedder=embedder.name, dim=embedder.dim)
    texts = {doc_id: collection.passage(doc_id) for doc_id in collection.documents}
    vectors = embedder.encode(list(texts.values()))
    documents = [document_of(*item) for item in texts.items()]
    for start in range(0, len(documents), _BATCH):
        batch = enumerate(documents[start : start + _BATCH], start)
        store.replace_documents(collection.name, [(*item, vectors[i : i + 1]) for i, item in batch])


async def _searched(
    collection: beir.Collection, search: PassageSearch, retrieval: Retrieval, rerank: str
) -> list[FoundPassages]:
    """The results of all questions, one at a time. The first one is asked twice: models load and kernels
    compile on the way."""
    options = SearchOptions(_CANDIDATES, retrieval=retrieval, rerank=rerank, candidates=_CANDIDATES)
    texts = list(collection.queries.values())
    await search.search(collection.name, texts[0], options)
    return [await search.search(collection.name, text, options) for text in texts]


async def _row(
    asked: Asked,
    engine: Any,
    prompts: PromptBuilder,
    retrieval: Retrieval,
    rerank: str,
    found: Sequence[FoundPassages],
) -> dict[str, Any]:
    collection = asked.collection
    pairs = [
        ([p.chunk.source for p in each.passages], collection.judged[query])
        for query, each in zip(collection.queries, found, strict=True)
    ]
    times = [each.rerank_ms for each in found if each.rerank_ms is not None]
    scores = await _answer_scores(asked, engine, prompts, found) if asked.answers else []
    return {
        "collection": collection.name,
        "questions": len(pairs),
        "passages": len(collection.documents),
        "retrieval": retrieval,
        "rerank": rerank if rerank in (OFF, KEYS) else Path(rerank).name,
        "ndcg@5": round(statistics.fmean(ndcg(*pair, _K) for pair in pairs), 4),
        "recall@5": round(statistics.fmean(recall(*pair, _K) for pair in pairs), 4),
        "recall@50": round(statistics.fmean(recall(*pair, _CANDIDATES) for pair in pairs), 4),
        "f1": round(statistics.fmean(f1 for f1, _ in scores), 4) if scores else None,
        "em": round(statistics.fmean(em for _, em in scores), 4) if scores else None,
        "ms_p50": round(percentile(times, 50), 1) if times else None,
        "ms_p90": round(percentile(times, 90), 1) if times else None,
    }


async def _answer_scores(
    asked: Asked, engine: Any, prompts: PromptBuilder, found: Sequence[FoundPassages]
) -> list[tuple[float, float]]:
    """Ask each question with its first passages: F1 and exact match of the answers."""
    room = engine.info.max_prompt_tokens - _ANSWER_TOKENS
    free = asyncio.Semaphore(_IN_FLIGHT)

    async def ask(name: str, passages: FoundPassages) -> tuple[float, float]:
        documents = [
            PromptDocument(str(p.chunk.chunk_id), p.chunk.title, p.chunk.text) for p in passages.passages[:_K]
        ]
        prompt = prompts.build(asked.collection.queries[name], documents, max_prompt_tokens=room)
        sampling = Sampling(max_new_tokens=_ANSWER_TOKENS, stop=prompt.stop)
        async with free:
            answer = await first_token(
                engine, GenerateRequest(name, prompt.input_ids, asked.collection.name, "full", sampling)
            )
        text = answer.text.strip()
        return token_f1(text, asked.answers[name]), exact_match(text, asked.answers[name])

    return await asyncio.gather(
        *(ask(name, each) for name, each in zip(asked.collection.queries, found, strict=True))
    )
