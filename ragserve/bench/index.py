"""The index beside raw FAISS: recall, latency, memory and build time of the four types at several sizes.

The rival is FAISS itself with identical parameters and the same vectors, built and measured in the same run.
Queries go one at a time, in one thread, to ours and to the rival alternately (A B, B A, ...), so that drift
and cache contents favour neither.

The place of an index in memory changes its speed by up to a quarter while it fits the caches, even between
two loads of one file. So the overhead compares ours with FAISS called directly on the same index in memory;
the rival's own copy is timed beside it. `search_ids` is the like-for-like call: scores and ids, of one
committed version. `search` also returns the chunks' rows."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ragserve.bench.index_vectors import SPREAD, multiply, sentences
from ragserve.errors import InvalidRequest
from ragserve.verification.report import GrowingReport, percentile

_K = 10
_CHUNKS_PER_DOCUMENT = 50
_DOCUMENTS_PER_BATCH = 40
_NAMESPACE = "bench"
_SECONDS_PER_SIDE = 6.0
TYPES = ("flat", "sq8", "ivf", "hnsw")


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    sizes: Sequence[int] = (10_000, 100_000, 500_000),
    types: Sequence[str] = TYPES,
    texts: Path | None = None,
    embedder: str = "all-MiniLM-L6-v2",
) -> dict[str, Any]:
    """Measure a row per size and type; the JSON is rewritten after each. ``quick``: 2,000 and 5,000 vectors,
    few queries.

    Raises InvalidRequest for an unknown type."""
    import numpy as np

    from ragserve.retrieval.embedder import Embedder

    if unknown := [kind for kind in types if kind not in TYPES]:
        raise InvalidRequest(f"Unknown index type {unknown[0]!r}.", hint=f"Choose from {', '.join(TYPES)}.")
    sizes = sorted((2_000, 5_000) if quick else sizes)
    lines = sentences(texts, 600 if quick else 4_000)
    n_queries = min(300, len(lines) // 5)
    real = Embedder(embedder).encode(lines)
    held_out = range(0, len(lines), 5)
    queries, real = real[::5][:n_queries], np.delete(real, held_out, axis=0)
    lines = [line for number, line in enumerate(lines) if number % 5]
    vectors, origin = multiply(real, sizes[-1])
    report = GrowingReport("index", out_dir / "index.json" if out_dir else None, note=_NOTE)
    report.workload = {
        "k": _K,
        "dim": vectors.shape[1],
        "vectors": f"{len(lines):,} real sentences ({texts.name if texts else 'examples/corpus'}, "
        f"{embedder}), moved along their covariance (x {SPREAD}), normalised",
        "queries": f"{n_queries} real sentences held out, one at a time, 1 thread",
    }
    for size in sizes:
        chosen = [lines[i] for i in origin[:size].tolist()]
        for row in _rows_of(vectors[:size], chosen, queries, types, quick):
            report.add(row)
    return report.show()


_NOTE = (
    "overhead %: of the medians, ours against FAISS called directly on the same index in memory, "
    "alternately; raw copy: the index that FAISS built itself (two copies of one index differ by their "
    "place in memory). build_s: from the registry into a saved file, raw: from memory into a file. rss: "
    "growth of the process when the saved index is opened. ivf is flat below 25,000 vectors."
)


def _rows_of(vectors: Any, lines: list[str], queries: Any, types: Sequence[str], quick: bool) -> Any:
    """Yield a row per type: the registry is written once, and the index built from it as each type in
    turn."""
    import faiss

    from ragserve_index import IndexStore

    n = len(vectors)
    _, truth = faiss.knn(queries, vectors, _K, metric=faiss.METRIC_INNER_PRODUCT)
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder:
        data_dir = Path(folder) / "data"
        started = time.perf_counter()
        with IndexStore(data_dir) as store:
            store.ensure_namespace(_NAMESPACE, embedder="bench", dim=vectors.shape[1])
            first = _write(store, vectors, lines)
        write_s = time.perf_counter() - started
        for index_type in types:
            raw_path = Path(folder) / "raw.faiss"
            figures = _compare(data_dir, raw_path, index_type, vectors, queries, truth + first, first, quick)
            yield {"vectors": n, "type": index_type, **figures, "registry write_s": round(write_s, 1)}


def _write(store: Any, vectors: Any, lines: list[str]) -> int:
    """Write documents of 50 chunks in batches of 40. Returns the id of the first chunk."""
    from ragserve_index import NewChunk, NewDocument

    step = _CHUNKS_PER_DOCUMENT * _DOCUMENTS_PER_BATCH
    for start in range(0, len(vectors), step):
        batch = []
        for at in range(start, min(start + step, len(vectors)), _CHUNKS_PER_DOCUMENT):
            part = lines[at : at + _CHUNKS_PER_DOCUMENT]
            chunks = [NewChunk(text, 0, len(text), len(text.split())) for text in part]
            document = NewDocument(
                f"document {at}", f"Document {at}", "", "text/plain", sum(map(len, part)), {"number": at}
            )
            batch.append((document, chunks, vectors[at : at + len(part)]))
        store.replace_documents(_NAMESPACE, batch)
    document = store.find_source(_NAMESPACE, "document 0")
    return int(store.document_chunks(_NAMESPACE, document.doc_id)[0].chunk_id)


def _compare(
    data_dir: Path,
    raw_path: Path,
    index_type: str,
    vectors: Any,
    queries: Any,
    truth: Any,
    first: int,
    quick: bool,
) -> dict[str, Any]:
    """Build, save, open and query both."""
    import faiss
    import numpy as np

    from ragserve_index import IndexStore

    started = time.perf_counter()
    raw = build_raw(index_type, vectors, np.arange(first, first + len(vectors)))
    faiss.write_index(raw, str(raw_path))
    raw_build_s = time.perf_counter() - started
    del raw
    with IndexStore(data_dir) as store:
        store.namespace(_NAMESPACE)
        started = time.perf_counter()
        store.rebuild(_NAMESPACE, index_type=index_type)
        build_s = time.perf_counter() - started
    raw, raw_rss, raw_open_s = _opened(lambda: tuned(faiss.read_index(str(raw_path))))
    store, rss, open_s = _opened(lambda: _open(data_dir, queries))
    with store:
        latency, recalls = _latency(store, raw, queries, truth, quick)
        structure = store.check(_NAMESPACE)[0]
    return {
        "structure": structure.structure,
        **recalls,
        **latency,
        "build_s": round(build_s, 2),
        "raw build_s": round(raw_build_s, 2),
        "open_s": round(open_s, 3),
        "raw open_s": round(raw_open_s, 3),
        "file MiB": round(structure.index_bytes / 2**20, 1),
        "raw file MiB": round(raw_path.stat().st_size / 2**20, 1),
        "rss MiB": round(rss / 2**20, 1),
        "raw rss MiB": round(raw_rss / 2**20, 1),
    }


def build_raw(index_type: str, vectors: Any, ids: Any) -> Any:
    """Build the index as FAISS documents it, with the parameters that ragserve_index uses at this size."""
    import faiss
    import numpy as np

    from ragserve_index.structures.flat import Sq8
    from ragserve_index.structures.hnsw import Hnsw
    from ragserve_index.structures.ivf import Ivf, lists_for

    n, dim = vectors.shape
    if index_type == "sq8":
        inner = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        inner.sq.rangestat, inner.sq.rangestat_arg = faiss.ScalarQuantizer.RS_minmax, 0.1
        inner.train(np.ascontiguousarray(vectors[:: max(1, -(-n // Sq8.TRAIN_SAMPLE))]))
        index: Any = faiss.IndexIDMap2(inner)
    elif index_type == "hnsw":
        graph = faiss.IndexHNSWFlat(dim, Hnsw.M, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = Hnsw.EF_CONSTRUCTION
        index = faiss.IndexIDMap(graph)
    elif index_type == "ivf" and n >= Ivf.TRAIN_FROM:
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists_for(n), faiss.METRIC_INNER_PRODUCT)
        index.cp.spherical, index.cp.max_points_per_centroid, index.cp.seed = True, Ivf.POINTS_PER_LIST, 1234
        index.train(np.ascontiguousarray(vectors[:: max(1, -(-n // (index.nlist * Ivf.POINTS_PER_LIST)))]))
    else:
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
    index.add_with_ids(vectors, ids)
    return index


def tuned(index: Any) -> Any:
    """Set the search parameters, which a saved FAISS index does not keep."""
    import faiss

    from ragserve_index.structures.hnsw import Hnsw
    from ragserve_index.structures.ivf import probes_for

    if isinstance(index, faiss.IndexIVFFlat):
        index.nprobe = probes_for(index.nlist)
    elif isinstance(inner := faiss.downcast_index(index.index), faiss.IndexHNSWFlat):
        inner.hnsw.efSearch = Hnsw.EF_SEARCH
    return index


def _open(data_dir: Path, queries: Any) -> Any:
    from ragserve_index import IndexStore

    store = IndexStore(data_dir)
    store.search_ids(_NAMESPACE, queries[:1], _K)  # loads the file
    return store


def _opened(make: Callable[[], Any]) -> tuple[Any, int, float]:
    """Returns what ``make`` returns, the bytes that the process grew by, and the seconds it took."""
    import psutil

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give freed memory back, so that growth means something
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    made = make()
    return made, process.memory_info().rss - before, time.perf_counter() - started


def _latency(
    store: Any, raw: Any, queries: Any, truth: Any, quick: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds per single-query search, and recall@10, of both."""
    import faiss

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        single = [queries[i : i + 1].copy() for i in range(len(queries))]
        for query in single:  # warm: pages, rows, branch predictors
            store.search(_NAMESPACE, query, _K)
        started = time.perf_counter()
        for query in single[:20]:
            raw.search(query, _K)
        each = (time.perf_counter() - started) / 20
        rounds = 1 if quick else max(1, min(20, round(_SECONDS_PER_SIDE / each / len(single))))
        asked = single * rounds
        same = store.faiss_index(_NAMESPACE)
        search_ids = partial(store.search_ids, _NAMESPACE, k=_K)
        ids_ms, raw_ms = alternate(search_ids, partial(same.search, k=_K), asked)
        rows_ms, raw_again_ms = alternate(
            partial(store.search, _NAMESPACE, k=_K), partial(same.search, k=_K), asked
        )
        _, copy_ms = alternate(search_ids, partial(raw.search, k=_K), asked)
        ours = [search_ids(query)[1][0] for query in single]
        theirs = [raw.search(query, _K)[1][0] for query in single]
    finally:
        faiss.omp_set_num_threads(threads)

    def recall(found: list[Any]) -> float:
        pairs = zip(found, truth, strict=True)
        return round(sum(len(set(a.tolist()) & set(b.tolist())) for a, b in pairs) / truth.size, 4)

    def overhead(own: list[float], rival: list[float]) -> float:
        return round(100 * (percentile(own, 50) / percentile(rival, 50) - 1), 1)

    latency = {
        "p50 ms": round(percentile(ids_ms, 50), 4),
        "raw p50 ms": round(percentile(raw_ms, 50), 4),
        "overhead %": overhead(ids_ms, raw_ms),
        "p99 ms": round(percentile(ids_ms, 99), 4),
        "raw p99 ms": round(percentile(raw_ms, 99), 4),
        "raw copy p50 ms": round(percentile(copy_ms, 50), 4),
        "with rows p50 ms": round(percentile(rows_ms, 50), 4),
        "with rows overhead %": overhead(rows_ms, raw_again_ms),
    }
    return latency, {"recall@10": recall(ours), "raw recall@10": recall(theirs)}


def alternate(
    ours: Callable[[Any], Any], rival: Callable[[Any], Any], queries: Sequence[Any]
) -> tuple[list[float], list[float]]:
    """Time each call in milliseconds; who goes first changes with every query."""
    times: tuple[list[float], list[float]] = ([], [])
    for number, query in enumerate(queries):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            call = rival if side else ours
            started = time.perf_counter()
            call(query)
            times[side].append((time.perf_counter() - started) * 1e3)
    return times
