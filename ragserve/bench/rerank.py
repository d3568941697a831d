"""Quality and time of reranking by the model's stored keys beside no reranking, on collections in BEIR's
layout: the first 5 of the 50 best passages of a dense search.

Runs the engine in this process group. Of a collection only the candidates of its questions are analysed."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragserve.answering.key_reranker import KeyReranker
from ragserve.answering.prompt import PromptBuilder
from ragserve.bench import beir
from ragserve.bench.ir_metrics import ndcg, recall
from ragserve.bench.retrieval import document_of
from ragserve.bench.retrieval_trace import warm_missing
from ragserve.config import load
from ragserve.errors import InvalidRequest
from ragserve.measuring import report
from ragserve.retrieval.passage_search import PassageSearch
from ragserve.retrieval.retriever import Retriever
from ragserve.retrieval.search_options import KEYS, SearchOptions

_K, _CANDIDATES = 5, 50
_BATCH = 256
_NOTE = (
    "ms: scoring the candidates of one question at a time, their analyses in memory; the question's pass "
    "included, its search not. nDCG: linear gain. Only candidates are analysed, once, before the measurement."
)


def run(
    out_dir: Path | None, *, quick: bool = False, data: Sequence[Path] = (), questions: int = 0
) -> dict[str, Any]:
    """Measure nDCG@5 and milliseconds per collection. ``questions``: spread over each collection; 0: all, or
    10 with ``quick``. Raises InvalidRequest without ``data``."""
    from ragserve.engine.offline import run_once

    if not data:
        raise InvalidRequest(
            "bench rerank needs collections to search.",
            hint="Give --data DIR, a folder in BEIR's layout; more than once for several.",
        )
    questions = questions or (10 if quick else 0)
    collections = [_some(beir.load(folder), questions) for folder in data]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder:
        settings = load(data_dir=Path(folder), kv_disk_bytes=0)

        async def work(engine: Any) -> str:
            for collection in collections:
                rows.extend(await _measure(collection, engine, settings))
            return str(engine.info.model)

        model = run_once(settings, work)
    return report.write(
        "rerank",
        {"model": Path(model).name, "embedder": settings.embedder, "candidates": _CANDIDATES},
        rows,
        out=out_dir / "rerank.json" if out_dir else None,
        note=_NOTE,
    )


def _some(collection: beir.Collection, count: int) -> beir.Collection:
    step = max(1, len(collection.queries) // count) if count else 1
    names = list(collection.queries)[::step][: count or None]
    return replace(collection, queries={name: collection.queries[name] for name in names})


async def _measure(collection: beir.Collection, engine: Any, settings: Any) -> list[dict[str, Any]]:
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import IndexStore

    embedder, prompts = Embedder.of(settings), PromptBuilder.load(engine.info.tokenizer)
    with IndexStore(settings.data_dir / collection.name) as store:
        store.ensure_namespace(collection.name, embedder=embedder.name, dim=embedder.dim)
        texts = {doc_id: collection.passage(doc_id) for doc_id in collection.documents}
        vectors = embedder.encode(list(texts.values()))
        documents = [document_of(*item) for item in texts.items()]
        for start in range(0, len(documents), _BATCH):
            batch = enumerate(documents[start : start + _BATCH], start)
            store.replace_documents(collection.name, [(*item, vectors[i : i + 1]) for i, item in batch])
        retriever = Retriever(store, embedder)
        search = PassageSearch(retriever, {KEYS: KeyReranker(engine, prompts)})
        try:
            found = [
                await search.search(collection.name, text, SearchOptions(_CANDIDATES))
                for text in collection.queries.values()
            ]
            chunks = {p.chunk.chunk_id: p.chunk for each in found for p in each.passages}
            ids = [prompts.document_ids(chunk.title, chunk.text) for chunk in chunks.values()]
            await warm_missing(engine, collection.name, ids)
            options = SearchOptions(_CANDIDATES, rerank=KEYS, candidates=_CANDIDATES)
            reranked = [
                await search.search(collection.name, text, options) for text in collection.queries.values()
            ]
        finally:
            await retriever.close()
    if any(p.rerank_score is None for each in reranked for p in each.passages):
        raise InvalidRequest(
            "Some candidates have no analysis: the cache has no room for them.",
            hint="Raise RAGSERVE_KV_HOST_BYTES, or take fewer questions.",
        )

    def row(system: str, results: Sequence[Any]) -> dict[str, Any]:
        pairs = [
            ([p.chunk.source for p in each.passages], collection.judged[query])
            for query, each in zip(collection.queries, results, strict=True)
        ]
        times = [each.rerank_ms for each in results if each.rerank_ms is not None]
        return {
            "collection": collection.name,
            "questions": len(pairs),
            "analysed": len(chunks),
            "rerank": system,
            "ndcg@5": round(statistics.fmean(ndcg(*pair, _K) for pair in pairs), 4),
            "recall@50": round(statistics.fmean(recall(*pair, _CANDIDATES) for pair in pairs), 4),
            "ms_p50": round(report.percentile(times, 50), 1) if times else None,
            "ms_p90": round(report.percentile(times, 90), 1) if times else None,
        }

    return [row("off", found), row(KEYS, reranked)]
