"""Search quality over several namespaces that together hold a collection, against the collection in one.

Each collection is in BEIR's layout. Its documents are parted at random, and so that the statistics of BM25
differ between namespaces as much as they can: by topic (k-means of the vectors), and by length (the shorter
half and the longer one). The rival of the joint search is the same search of the whole collection; beside it,
``own_statistics`` merges what each namespace's own lexical search scores. Takes about ten
minutes on two quiet cores.

    python -m benchmarks.namespace_split --data DIR ... --out benchmarks/results/namespace-split.json"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ragserve.bench import beir
from ragserve.bench.retrieval import document_of
from ragserve.eval.ir_metrics import ndcg
from ragserve.retrieval.embedder import Embedder
from ragserve.verification import report
from ragserve_index import IndexStore, lexical_indexes
from ragserve_index.types import Hit

DEPTH = 10
LEAST = 0.005  # of nDCG@10: a difference that is not more counts as none
SEED = 1
WHOLE = "whole"
Search = Callable[[Sequence[str], str, np.ndarray], Sequence[Hit]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2")
    parser.add_argument("--queries", type=int, help="the first so many of each collection")
    arguments = parser.parse_args()
    model = Embedder(arguments.embedder, device="cpu")
    rows: list[dict[str, Any]] = []
    for folder in arguments.data:
        collection = beir.load(folder, max_queries=arguments.queries)
        passages = [collection.passage(doc_id) for doc_id in collection.documents]
        vectors = model.encode(passages)
        asked = model.encode_queries(list(collection.queries.values()))
        for lexical in ("registry", "tantivy"):
            rows += _rows(collection, passages, vectors, asked, lexical)
    report.write(
        "namespace split",
        {"depth": DEPTH, "embedder": arguments.embedder, "seed": SEED, "within": LEAST},
        rows,
        out=arguments.out,
        note="difference: nDCG@10 of the parts less that of the whole, means over queries. "
        "own_statistics: likewise, where each part's own BM25 is merged.",
    )


def _rows(
    collection: beir.Collection, passages: list[str], vectors: np.ndarray, asked: np.ndarray, lexical: str
) -> list[dict[str, Any]]:
    splits, every = _splits(passages, vectors), list(collection.documents)
    with tempfile.TemporaryDirectory() as folder, _lexical_by(lexical), IndexStore(Path(folder)) as store:
        _fill(store, WHOLE, every, passages, vectors)
        names: dict[str, list[str]] = {}
        for split, parts in splits.items():
            names[split] = [f"{split.replace(' ', '-')}-{part}" for part in range(int(parts.max()) + 1)]
            for part, name in enumerate(names[split]):
                chosen = np.flatnonzero(parts == part)
                ids = [every[i] for i in chosen]
                _fill(store, name, ids, [passages[i] for i in chosen], vectors[chosen])
        store.save()  # brings the indexes of tantivy up to date
        rows = []
        for search, joint, alone in _searches(store):
            if search == "dense" and lexical == "tantivy":
                continue
            whole = _ndcg(collection, asked, alone, [WHOLE])
            for split in splits:
                found = _ndcg(collection, asked, joint, names[split])
                row = {
                    "collection": collection.name,
                    "documents": len(passages),
                    "queries": len(whole),
                    "search": search,
                    "lexical_index": None if search == "dense" else lexical,
                    "split": split,
                    "namespaces": len(names[split]),
                    "whole": round(statistics.fmean(whole), 4),
                    "parts": round(statistics.fmean(found), 4),
                    "difference": round(statistics.fmean(found) - statistics.fmean(whole), 4),
                    "queries_that_differ": sum(a != b for a, b in zip(whole, found, strict=True)),
                }
                if search == "lexical" and lexical == "registry":
                    own = _ndcg(collection, asked, _merged(store), names[split])
                    row["own_statistics"] = round(statistics.fmean(own) - statistics.fmean(whole), 4)
                rows.append(row)
                print(row, flush=True)
        return rows


def _splits(passages: Sequence[str], vectors: np.ndarray) -> Mapping[str, np.ndarray]:
    """The part of each document, by split."""
    import faiss

    found = {}
    for n in (2, 4, 8):
        found[f"random {n}"] = np.random.default_rng(SEED).integers(0, n, len(passages))
    means = faiss.Kmeans(vectors.shape[1], 4, seed=SEED, verbose=False)
    means.train(np.ascontiguousarray(vectors, dtype=np.float32))
    found["topic"] = means.index.search(np.ascontiguousarray(vectors, dtype=np.float32), 1)[1][:, 0]
    lengths = np.array([len(each.split()) for each in passages])
    found["length"] = (lengths > np.median(lengths)).astype(np.int64)
    return found


@contextmanager
def _lexical_by(name: str) -> Iterator[None]:
    """Let all namespaces have an index of tantivy, or none."""
    before = lexical_indexes.FROM
    lexical_indexes.FROM = 1 if name == "tantivy" else 10**9
    try:
        yield
    finally:
        lexical_indexes.FROM = before


def _fill(
    store: IndexStore, namespace: str, ids: Sequence[str], passages: Sequence[str], vectors: np.ndarray
) -> None:
    store.ensure_namespace(namespace, embedder="e", dim=vectors.shape[1])
    rows = [
        (*document_of(doc_id, text), vectors[i : i + 1])
        for i, (doc_id, text) in enumerate(zip(ids, passages, strict=True))
    ]
    for start in range(0, len(rows), 256):
        store.replace_documents(namespace, rows[start : start + 256])


def _searches(store: IndexStore) -> Iterator[tuple[str, Search, Search]]:
    """Name, search of several namespaces, search of one."""
    yield (
        "dense",
        lambda names, text, vector: store.search_several(names, DEPTH, vector=vector).hits,
        lambda names, text, vector: store.search(names[0], vector[None], DEPTH).hits[0],
    )
    yield (
        "lexical",
        lambda names, text, vector: store.search_several(names, DEPTH, text=text).hits,
        lambda names, text, vector: store.search_text(names[0], text, DEPTH).hits[0],
    )
    yield (
        "hybrid",
        lambda names, text, vector: store.search_several(names, DEPTH, text=text, vector=vector).hits,
        lambda names, text, vector: store.search_text(names[0], text, DEPTH, vector=vector).hits[0],
    )


def _merged(store: IndexStore) -> Search:
    def search(names: Sequence[str], text: str, vector: np.ndarray) -> Sequence[Hit]:
        hits = [hit for name in names for hit in store.search_text(name, text, DEPTH).hits[0]]
        return sorted(hits, key=lambda hit: -hit.score)[:DEPTH]

    return search


def _ndcg(
    collection: beir.Collection, asked: np.ndarray, search: Search, names: Sequence[str]
) -> list[float]:
    found = []
    for (query, text), vector in zip(collection.queries.items(), asked, strict=True):
        ranking = [hit.chunk.source for hit in search(names, text, vector)]
        found.append(ndcg(ranking, collection.judged[query], DEPTH))
    return found


if __name__ == "__main__":
    main()
