"""Retrieval quality of dense, lexical and hybrid search beside BM25, on collections in BEIR's layout.

Every passage is one chunk (they are short); a document's score is that of its best chunk. The rival is bm25s
with Lucene's BM25, k1 = 1.5, b = 0.75, no stemming and no stop words, over the same passages and queries in
the same run."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.bench import beir
from ragserve.errors import InvalidRequest
from ragserve.eval.ir_metrics import ndcg, recall
from ragserve.setting_groups.ingestion import IndexType
from ragserve.verification import report

if TYPE_CHECKING:
    from ragserve_index.types import SearchResult

_DEPTH = 10
_BATCH = 256


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    data: Sequence[Path] = (),
    index_types: Sequence[IndexType] = ("flat",),
    embedder: str = "all-MiniLM-L6-v2",
    device: str = "auto",
) -> dict[str, Any]:
    """Measure nDCG@10 and recall@10 per collection. ``quick``: the first 50 queries. Raises InvalidRequest
    without ``data``."""
    from ragserve.retrieval.embedder import Embedder

    if not data:
        raise InvalidRequest(
            "bench retrieval needs collections to search.",
            hint="Give --data DIR, a folder in BEIR's layout; more than once for several.",
        )
    model = Embedder(embedder, device=device)
    rows: list[dict[str, Any]] = []
    for folder in data:
        collection = beir.load(folder, max_queries=50 if quick else None)
        passages = [collection.passage(doc_id) for doc_id in collection.documents]
        if find_spec("bm25s") is not None:
            rows.append(_row(collection, "bm25s", *_bm25(collection, passages)))
        started = time.perf_counter()
        vectors = model.encode(passages)
        embed_s = time.perf_counter() - started
        for index_type in index_types:
            build_s, searched = _ours(collection, passages, vectors, model, index_type)
            for system, (rankings, query_ms) in searched.items():
                whole_s = build_s if system == "lexical" else embed_s + build_s
                rows.append(_row(collection, system, rankings, whole_s, query_ms))
    queries = "first 50" if quick else "all with a relevant document"
    return report.write(
        "retrieval",
        {"depth": _DEPTH, "embedder": embedder, "queries": queries},
        rows,
        out=out_dir / "retrieval.json" if out_dir else None,
        note="bm25s, where it is installed: Lucene's BM25, k1 1.5, b 0.75. query_ms: one at a time, "
        "embedding included; build_s: "
        "likewise, with registry and both indexes. nDCG: linear gain.",
    )


def _row(
    collection: beir.Collection,
    system: str,
    rankings: dict[str, list[str]],
    build_s: float,
    query_ms: list[float],
) -> dict[str, Any]:
    def mean(measure: Callable[[Sequence[str], dict[str, int], int], float]) -> float:
        return statistics.fmean(
            measure(rankings[q], collection.judged[q], _DEPTH) for q in collection.queries
        )

    return {
        "collection": collection.name,
        "documents": len(collection.documents),
        "queries": len(collection.queries),
        "system": system,
        "ndcg@10": round(mean(ndcg), 4),
        "recall@10": round(mean(recall), 4),
        "query_ms_p50": round(report.percentile(query_ms, 50), 3),
        "build_s": round(build_s, 2),
    }


def _bm25(
    collection: beir.Collection, passages: list[str]
) -> tuple[dict[str, list[str]], float, list[float]]:
    import bm25s

    ids = list(collection.documents)
    started = time.perf_counter()
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    index.index(bm25s.tokenize(passages, stopwords=None, show_progress=False), show_progress=False)
    build_s = time.perf_counter() - started

    def search(text: str) -> list[str]:
        tokens = bm25s.tokenize([text], stopwords=None, show_progress=False)
        found, scores = index.retrieve(tokens, k=min(_DEPTH, len(ids)), show_progress=False)
        return [ids[int(place)] for place, score in zip(found[0], scores[0], strict=True) if score > 0]

    rankings, query_ms = _timed(collection, search)
    return rankings, build_s, query_ms


def _ours(
    collection: beir.Collection, passages: list[str], vectors: Any, model: Any, index_type: IndexType
) -> tuple[float, dict[str, tuple[dict[str, list[str]], list[float]]]]:
    """Seconds to write the collection, then rankings and milliseconds of each search."""
    from ragserve_index import IndexStore

    with (
        tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder,
        IndexStore(Path(folder), index_type=index_type) as store,
    ):
        started = time.perf_counter()
        store.ensure_namespace("bench", embedder=model.name, dim=model.dim, index_type=index_type)
        documents = [document_of(*item) for item in zip(collection.documents, passages, strict=True)]
        for start in range(0, len(documents), _BATCH):
            batch = documents[start : start + _BATCH]
            store.replace_documents(
                "bench", [(*item, vectors[start + i : start + i + 1]) for i, item in enumerate(batch)]
            )
        build_s = time.perf_counter() - started

        def dense(text: str) -> SearchResult:
            return store.search("bench", model.encode_queries([text]), _DEPTH)

        def lexical(text: str) -> SearchResult:
            return store.search_text("bench", text, _DEPTH)

        def hybrid(text: str) -> SearchResult:
            return store.search_text("bench", text, _DEPTH, vector=model.encode_queries([text])[0])

        searches = {f"dense {index_type}": dense, "lexical": lexical, f"hybrid {index_type}": hybrid}

        # One chunk a document, so the best chunk's order is the documents' order; dict keeps it were there
        # several.
        def sources(search: Callable[[str], SearchResult]) -> Callable[[str], list[str]]:
            return lambda text: list(dict.fromkeys(hit.chunk.source for hit in search(text).hits[0]))

        return build_s, {system: _timed(collection, sources(search)) for system, search in searches.items()}


def document_of(doc_id: str, text: str) -> tuple[Any, list[Any]]:
    """Make a document of one chunk for ``IndexStore.replace_documents``."""
    from ragserve_index.types import NewChunk, NewDocument

    data = text.encode()
    document = NewDocument(doc_id, "", hashlib.sha256(data).hexdigest(), "text/plain", len(data))
    # search does not read n_tokens: counting words saves a tokenizer
    return document, [NewChunk(text=text, start=0, end=len(text), n_tokens=len(text.split()))]


def _timed(
    collection: beir.Collection, search: Callable[[str], list[str]]
) -> tuple[dict[str, list[str]], list[float]]:
    rankings, query_ms = {}, []
    search(next(iter(collection.queries.values())))  # warm caches and lazy imports
    for query, text in collection.queries.items():
        started = time.perf_counter()
        rankings[query] = search(text)
        query_ms.append((time.perf_counter() - started) * 1000)
    return rankings, query_ms
