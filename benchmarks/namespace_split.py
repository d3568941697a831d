"""Search quality and time over several namespaces that together hold a collection, beside one that does.

A collection is a folder in BEIR's layout, or a question set whose documents are pooled. Its documents are
parted at random, evenly and with four fifths of them in one namespace, and so that the statistics of BM25
differ between namespaces as much as they can: by topic (k-means of the vectors), and by length (the shorter
half and the longer one). The rival of the joint search is the same search of the whole collection; beside it,
``own_statistics`` merges what each namespace's own lexical search scores.

Large namespaces have an index of tantivy, and small ones are searched in the registry. Each collection is
searched with none indexed, with all, and with those that hold half of the collection or more, so that one
search meets both. Takes about half an hour of CPU time.

    python -m benchmarks.namespace_split --data DIR|SET.jsonl ... --out FILE.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ragserve.bench import beir
from ragserve.bench.retrieval import document_of
from ragserve.eval import data
from ragserve.eval.ir_metrics import ndcg
from ragserve.retrieval.embedder import Embedder
from ragserve.verification import report
from ragserve_index import IndexStore, lexical_indexes
from ragserve_index.types import Hit

DEPTH = 10
LEAST = 0.005  # of nDCG@10: a difference that is not more counts as none
SEED = 1
WHOLE = "whole"
INDEXED = {"none": None, "halves": 0.5, "all": 0.0}  # least share of the collection that has an index
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
    for path in arguments.data:
        collection = _collection(path, arguments.queries)
        passages = [collection.passage(doc_id) for doc_id in collection.documents]
        rows += _rows(collection, passages, model)
        report.write(
            "namespace split",
            {"depth": DEPTH, "embedder": arguments.embedder, "seed": SEED, "within": LEAST},
            rows,
            out=arguments.out,
            note="difference: nDCG@10 of the parts less that of the whole, means over queries; interval: of "
            "95 %, by bootstrap. own_statistics: likewise, where each part's own BM25 is merged. "
            "ms: CPU time of the process, medians of one search at a time, without embedding the query.",
        )


def _collection(path: Path, queries: int | None) -> beir.Collection:
    if path.is_dir():
        return beir.load(path, max_queries=queries)
    questions = data.load(path, queries)
    passages = data.distinct_passages(data.load(path))
    return beir.Collection(
        data.set_name(path),
        {one.key: (one.title, one.text) for one in passages},
        {one.id: one.question for one in questions},
        {one.id: {gold.key: 1 for gold in one.gold} for one in questions},
    )


def _rows(collection: beir.Collection, passages: list[str], model: Embedder) -> list[dict[str, Any]]:
    vectors = model.encode(passages)
    asked = model.encode_queries(list(collection.queries.values()))
    splits, every = _splits(passages, vectors), list(collection.documents)
    with tempfile.TemporaryDirectory() as folder, IndexStore(Path(folder)) as store:
        _fill(store, WHOLE, every, passages, vectors)
        names: dict[str, list[str]] = {}
        for split, parts in splits.items():
            names[split] = [f"{split.replace(' ', '-')}-{part}" for part in range(int(parts.max()) + 1)]
            for part, name in enumerate(names[split]):
                chosen = np.flatnonzero(parts == part)
                ids = [every[i] for i in chosen]
                _fill(store, name, ids, [passages[i] for i in chosen], vectors[chosen])
        rows = []
        for indexed, least in INDEXED.items():
            with _indexed_from(10**9 if least is None else max(1, int(least * len(passages)))):
                store.save()  # brings the indexes of tantivy up to date
                for search, joint, alone in _searches(store):
                    if search == "dense" and indexed != "none":
                        continue
                    whole, whole_ms = _ndcg(collection, asked, alone, [WHOLE])
                    for split in splits:
                        found, ms = _ndcg(collection, asked, joint, names[split])
                        row = {
                            "collection": collection.name,
                            "documents": len(passages),
                            "queries": len(whole),
                            "search": search,
                            "indexed": None if search == "dense" else indexed,
                            "split": split,
                            "namespaces": len(names[split]),
                            "whole": round(statistics.fmean(whole), 4),
                            "parts": round(statistics.fmean(found), 4),
                            "difference": round(statistics.fmean(found) - statistics.fmean(whole), 4),
                            "interval": _interval(whole, found),
                            "queries_that_differ": sum(a != b for a, b in zip(whole, found, strict=True)),
                            "whole_ms": whole_ms,
                            "parts_ms": ms,
                        }
                        if search == "lexical" and indexed == "none":
                            own, _ = _ndcg(collection, asked, _merged(store), names[split])
                            row["own_statistics"] = round(statistics.fmean(own) - statistics.fmean(whole), 4)
                        rows.append(row)
                        print(row, flush=True)
        return rows


def _splits(passages: Sequence[str], vectors: np.ndarray) -> Mapping[str, np.ndarray]:
    """The part of each document, by split."""
    import faiss

    found: dict[str, np.ndarray] = {}
    for n in (2, 5, 10, 50):
        found[f"random {n}"] = np.random.default_rng(SEED).integers(0, n, len(passages))
    for n in (10, 50):  # the first has four fifths
        chance = np.random.default_rng(SEED)
        small = chance.integers(1, n, len(passages))
        found[f"one large {n}"] = np.where(chance.random(len(passages)) < 0.8, 0, small)
    means = faiss.Kmeans(vectors.shape[1], 4, seed=SEED, verbose=False)
    means.train(np.ascontiguousarray(vectors, dtype=np.float32))
    found["topic"] = means.index.search(np.ascontiguousarray(vectors, dtype=np.float32), 1)[1][:, 0]
    lengths = np.array([len(each.split()) for each in passages])
    found["length"] = (lengths > np.median(lengths)).astype(np.int64)
    return found


@contextmanager
def _indexed_from(n_chunks: int) -> Iterator[None]:
    """Let namespaces of so many chunks have an index of tantivy."""
    before = lexical_indexes.FROM
    lexical_indexes.FROM = n_chunks
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
) -> tuple[list[float], float]:
    """nDCG@10 of each query, and the median milliseconds of CPU time of one search."""
    found, took = [], []
    first = next(iter(collection.queries.values()))
    search(names, first, asked[0])  # opens the indexes
    for (query, text), vector in zip(collection.queries.items(), asked, strict=True):
        began = time.process_time()
        hits = search(names, text, vector)
        took.append((time.process_time() - began) * 1e3)
        found.append(ndcg([hit.chunk.source for hit in hits], collection.judged[query], DEPTH))
    return found, round(statistics.median(took), 2)


def _interval(whole: Sequence[float], found: Sequence[float]) -> list[float]:
    differences = np.subtract(found, whole)
    drawn = np.random.default_rng(SEED).choice(differences, (2_000, len(differences))).mean(axis=1)
    return [round(float(each), 4) for each in np.quantile(drawn, (0.025, 0.975))]


if __name__ == "__main__":
    main()
