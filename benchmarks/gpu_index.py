"""The index on a GPU beside the CPU and beside raw FAISS: build, search, recall, filters and removals.

    python -m benchmarks.gpu_index OUT.json [--sizes 1000000,10000000] [--parts flat,ivf,store,cagra,cuvs]
        [--sentences FILE.npy] [--device cpu]

Needs `faiss-gpu-cuvs` in place of `faiss-cpu`; `--device cpu` measures the CPU sides alone. An existing
OUT.json is continued: a later run, on the same machine, replaces the rows that it measures again.

Vectors and queries are those of `ragserve bench index`: real sentences, moved along their covariance.
`--sentences` gives their embeddings [m, dim] where no embedder is at hand. `flat` and `ivf` are measured
without a registry: ragserve's structure, and its copy on the GPU. `store` compares an `IndexStore` on both
devices: filters, removals, additions, large k. `cagra` and `cuvs` are FAISS alone: ragserve uses neither."""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from ragserve.bench.index import alternate, build_raw, tuned
from ragserve.bench.index_vectors import SPREAD, multiply_on, sentences
from ragserve.verification.report import GrowingReport, percentile, read_report
from ragserve_index import IndexStore, NewChunk, NewDocument, Range
from ragserve_index.gpu import GpuMirror
from ragserve_index.structures import create
from ragserve_index.structures.base import Structure, load_faiss
from ragserve_index.structures.ivf import Ivf, lists_for, probes_for

faiss = load_faiss()
PARTS = ("flat", "ivf", "store", "cagra", "cuvs")
K, BATCH, FIRST = 10, 64, 1_000  # FIRST: the lowest id, so that ids are not rows
SLAB = 65_536
STORE_VECTORS = 100_000
TRAIN_ON_CPU = 2_000_000  # more vectors: lists are trained and filled on the GPU, which takes the CPU minutes
SECONDS = 8.0  # for the single queries of two sides
NOTE = (
    "build_s: from vectors in memory; ragserve gpu: the first search, which copies the CPU structure; "
    "store: registry and index. ivf above 2,000,000 vectors is built on the GPU alone, and the CPU "
    "sides are one copy of it. Single queries on the CPU use one thread, batches all. recall@10: "
    "against exact search in PyTorch, all queries. MiB: growth while it was built. same ids, score "
    "difference: ragserve gpu against ragserve cpu, after up to a thousand removals that take each "
    "query's best; copy_s: the copy after them. store: over all searches, with filters of 1 %, 30 % and "
    "90 %, k 10, 500 and 2,000, after changes."
)
Search = Callable[[Any], tuple[Any, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default="1000000,10000000")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--sentences", type=Path)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    given = parser.parse_args()
    parts, sizes = given.parts.split(","), sorted(map(int, given.sizes.split(",")))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    run = Run(given.device == "gpu", given.sentences, sizes[-1])
    _, rows = read_report(given.out)
    key = ("index", "vectors", "side")
    report = GrowingReport("index on a GPU", given.out, note=NOTE, key=key, earlier=rows, order=_order)
    report.workload = run.workload
    # cuVS comes last: a failed assertion in CUDA code ends the process.
    for part in (part for part in PARTS if part in parts):
        for size in [min(STORE_VECTORS, sizes[-1])] if part == "store" else sizes:
            for row in getattr(run, part)(size):
                report.add(row)
    report.show()


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return ("flat", "ivf", "cagra", "store flat", "store ivf").index(row["index"]), row["vectors"]


class Run:
    """The vectors and queries of a run, and a row for each side of each part."""

    def __init__(self, gpu: bool, embedded: Path | None, most: int) -> None:
        self.gpu = gpu
        if gpu and (not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() < 1):
            raise SystemExit(f"FAISS {faiss.__version__} at {faiss.__file__} sees no GPU")
        real = np.load(embedded).astype(np.float32) if embedded else _embedded()
        self.queries = np.ascontiguousarray(real[::5])
        started = time.perf_counter()
        held_out = np.delete(real, range(0, len(real), 5), axis=0)
        self.vectors = multiply_on("cuda" if gpu else "cpu", held_out, most)
        print(f"{most:,} vectors in {time.perf_counter() - started:.0f} s", flush=True)
        self.resources = faiss.StandardGpuResources() if gpu else None
        self._truth: dict[int, Any] = {}
        self.workload = {
            "k": K,
            "dim": real.shape[1],
            "vectors": f"{len(held_out):,} real sentences, moved along their covariance (x {SPREAD})",
            "queries": f"{len(self.queries)} real sentences held out, singly and in batches of {BATCH}",
            "faiss": f"{faiss.__version__} ({faiss.get_compile_options().strip()})",
            "threads": faiss.omp_get_max_threads(),
        }

    def flat(self, n: int) -> Iterator[dict[str, Any]]:
        """Exact search, without cuVS."""
        yield from self._beside("flat", n, self._raw_flat, 0)

    def ivf(self, n: int) -> Iterator[dict[str, Any]]:
        """Inverted lists, without cuVS."""
        yield from self._beside("ivf", n, self._raw_ivf, FIRST)

    def cagra(self, n: int) -> Iterator[dict[str, Any]]:
        """cuVS's graph, at two widths of the search."""
        if not self.gpu or not hasattr(faiss, "GpuIndexCagra"):
            return

        def build() -> Any:
            index = faiss.GpuIndexCagra(self.resources, self.vectors.shape[1], faiss.METRIC_INNER_PRODUCT)
            index.train(self.vectors[:n])
            return index

        index, built = _measured(build)
        for width in (64, 128):
            params = faiss.SearchParametersCagra(itopk_size=width)
            yield self._row(
                "cagra", n, f"faiss gpu cuvs, width {width}", partial(index.search, k=K, params=params), built
            )

    def cuvs(self, n: int) -> Iterator[dict[str, Any]]:
        """Flat and ivf as cuVS does them."""
        if not self.gpu or not hasattr(faiss, "GpuIndexCagra"):
            return
        for kind, build, first in (("flat", self._raw_flat, 0), ("ivf", self._raw_ivf, FIRST)):
            index, built = _measured(partial(build, n, cuvs=True))
            yield self._row(kind, n, "faiss gpu cuvs", partial(index.search, k=K), built, first)
            del index

    def store(self, n: int) -> Iterator[dict[str, Any]]:
        """An IndexStore on both devices over the same registry: equal results are checked, not only timed."""
        for index_type in ("flat", "ivf"):
            with tempfile.TemporaryDirectory(prefix="ragserve-gpu-index-") as folder:
                found = {}
                for device in ("cpu", "gpu") if self.gpu else ("cpu",):
                    with IndexStore(Path(folder) / device, device=device) as store:
                        store.ensure_namespace(
                            "n", embedder="e", dim=self.vectors.shape[1], index_type=index_type
                        )
                        row, found[device] = self._through_the_store(store, n)
                    extra = _compared(found["gpu"], found["cpu"]) if device == "gpu" else {}
                    yield (
                        {"index": f"store {index_type}", "vectors": n, "side": f"ragserve {device}"}
                        | row
                        | extra
                    )

    def _through_the_store(self, store: IndexStore, n: int) -> tuple[dict[str, Any], list[Any]]:
        """Returns the latencies and the results of all kinds of searches, before and after changes."""
        documents, started = range(0, n, 50), time.perf_counter()
        for at in range(0, n, 2_000):
            some = documents[at // 50 : (at + 2_000) // 50]
            store.replace_documents("n", [_document(d, self.vectors[d : d + 50]) for d in some])
        store.rebuild("n")  # so that both devices have lists from the same vectors

        def search(queries: Any, k: int = K, **options: Any) -> tuple[Any, Any]:
            return store.search_ids("n", queries, k, **options)[:2]

        search(self.queries[:1])
        built = {"build_s": round(time.perf_counter() - started, 1)}
        alone, all_at_once = self._single(search), self._batches(search)
        results = []

        def ask() -> None:
            results.append(search(self.queries))
            results.append(search(self.queries[:20], 500))
            results.append(search(self.queries[:5], 2_000))
            results.extend(
                search(self.queries, K, filter=Range(field="number", lt=n * share))[:2]
                for share in (0.01, 0.3, 0.9)
            )

        ask()
        best = sorted({int(row[0]) for row in results[0][1]})[:200]
        gone = {chunk.doc_id for chunk in store.chunks("n", best)}
        for doc_id in gone:
            store.remove_document("n", doc_id)
        if set(best) & set(search(self.queries)[1].ravel().tolist()):
            raise SystemExit("removed chunks were found")
        ask()
        store.replace_documents(
            "n", [_document(n + d, self.vectors[d : d + 50][::-1].copy()) for d in documents[:40]]
        )
        ask()
        return built | alone | all_at_once | {"removed documents": len(gone)}, results

    def _beside(
        self, kind: str, n: int, build_on_gpu: Callable[..., Any], first_on_gpu: int
    ) -> Iterator[dict[str, Any]]:
        vectors, ids = self.vectors[:n], np.arange(FIRST, FIRST + n)
        filled_on_gpu = kind == "ivf" and self.gpu and n > TRAIN_ON_CPU
        raw = None
        if self.gpu:
            raw, built = _measured(partial(build_on_gpu, n, cuvs=False))
            yield self._row(kind, n, "faiss gpu", partial(raw.search, k=K), built, first_on_gpu)
        if filled_on_gpu:
            on_cpu, built = _measured(lambda: tuned(faiss.index_gpu_to_cpu(raw)))
            built.pop("build_s")
        else:
            on_cpu, built = _measured(lambda: tuned(build_raw(kind, vectors, ids)))
        raw = None
        if not filled_on_gpu:
            structure, ours_built = _measured(lambda: _structure(kind, vectors, ids))
        else:
            on_cpu.set_direct_map_type(faiss.DirectMap.Hashtable)
            structure, ours_built = Ivf(on_cpu, n), {}
        ours = partial(structure.search, k=K)
        single = self._singles_on_cpu(ours, partial(on_cpu.search, k=K))
        yield self._row(kind, n, "faiss cpu", partial(on_cpu.search, k=K), built, FIRST, single[1])
        del on_cpu
        yield self._row(kind, n, "ragserve cpu", ours, ours_built, FIRST, single[0])
        if not self.gpu:
            return
        mirror = GpuMirror()
        copied = partial(mirror.search, structure, k=K)
        _, copy = _measured(lambda: copied(self.queries[:1]))
        row = self._row(kind, n, "ragserve gpu", copied, copy, FIRST)
        yield row | self._after_removals(structure, copied)

    def _after_removals(self, structure: Structure, copied: Search) -> dict[str, Any]:
        best = np.unique(structure.search(self.queries, 3)[1])[:1_000]
        structure.remove(best)
        started = time.perf_counter()
        copied(self.queries[:1])
        took = round(time.perf_counter() - started, 2)
        on_gpu, on_cpu = copied(self.queries), structure.search(self.queries, K)
        if np.isin(on_gpu[1], best).any():
            raise SystemExit("removed vectors were found on the GPU")
        return {"copy_s": took} | _compared([on_gpu], [on_cpu])

    def _row(
        self,
        kind: str,
        n: int,
        side: str,
        search: Search,
        built: dict[str, Any],
        first: int = 0,
        single: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        search(self.queries[:BATCH])  # warm
        found = search(self.queries)[1]
        truth = self._exact(n) + first
        recall = sum(len(np.intersect1d(*pair)) for pair in zip(found, truth, strict=True)) / truth.size
        latency = (self._single(search) if single is None else single) | self._batches(search)
        return {"index": kind, "vectors": n, "side": side, "recall@10": round(recall, 4)} | latency | built

    def _single(self, search: Search) -> dict[str, Any]:
        """One query at a time."""
        return _latency(_timed(search, self._one_by_one(search, SECONDS / 2)))

    def _singles_on_cpu(self, ours: Search, raw: Search) -> tuple[dict[str, Any], dict[str, Any]]:
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        try:
            both = alternate(ours, raw, self._one_by_one(ours, SECONDS / 2))
        finally:
            faiss.omp_set_num_threads(threads)
        return _latency(both[0]), _latency(both[1])

    def _one_by_one(self, search: Search, seconds: float) -> list[Any]:
        """Queries for so many seconds, at least 5, at most 1,000."""
        single = [self.queries[i : i + 1].copy() for i in range(len(self.queries))]
        each = min(_timed(search, single[:3])) / 1e3
        count = max(5, min(1_000, round(seconds / each)))
        return (single * (count // len(single) + 1))[:count]

    def _batches(self, search: Search) -> dict[str, Any]:
        whole = len(self.queries) // BATCH * BATCH
        batches = [self.queries[at : at + BATCH].copy() for at in range(0, max(whole, 1), BATCH)]
        each = _timed(search, batches[:1])[0] / 1e3
        times = _timed(search, batches * max(1, min(20, round(2 / each / len(batches)))))
        return {
            "batch p50 ms": round(percentile(times, 50), 3),
            "queries/s": round(BATCH / percentile(times, 50) * 1e3),
        }

    def _exact(self, n: int) -> Any:
        """Rows of the nearest vectors [queries, K], by PyTorch."""
        if n not in self._truth:
            device = "cuda" if self.gpu else "cpu"
            queries = torch.from_numpy(self.queries).to(device)
            best = (
                torch.empty(len(queries), 0, device=device),
                torch.empty(len(queries), 0, dtype=torch.long, device=device),
            )
            for at in range(0, n, 1 << 19):
                part = queries @ torch.from_numpy(self.vectors[at : min(n, at + (1 << 19))]).to(device).T
                scores, rows = part.topk(min(K, part.shape[1]), dim=1)
                scores, rows = torch.cat([best[0], scores], 1), torch.cat([best[1], rows + at], 1)
                scores, order = scores.topk(min(K, scores.shape[1]), dim=1)
                best = scores, rows.gather(1, order)
            self._truth[n] = best[1].cpu().numpy()
        return self._truth[n]

    def _raw_flat(self, n: int, cuvs: bool) -> Any:
        config = faiss.GpuIndexFlatConfig()
        config.use_cuvs = cuvs
        index = faiss.GpuIndexFlatIP(self.resources, self.vectors.shape[1], config)
        index.add(self.vectors[:n])
        return index

    def _raw_ivf(self, n: int, cuvs: bool) -> Any:
        """Trained and filled on the GPU, with the parameters that ragserve uses at this size."""
        config = faiss.GpuIndexIVFFlatConfig()
        config.use_cuvs = cuvs
        lists = lists_for(n)
        index = faiss.GpuIndexIVFFlat(
            self.resources, self.vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT, config
        )
        index.cp.spherical, index.cp.max_points_per_centroid, index.cp.seed = True, Ivf.POINTS_PER_LIST, 1234
        index.nprobe = probes_for(lists)
        index.train(_sample(self.vectors[:n], lists * Ivf.POINTS_PER_LIST))
        for at in range(0, n, SLAB * 8):
            rows = self.vectors[at : min(n, at + SLAB * 8)]
            index.add_with_ids(rows, np.arange(FIRST + at, FIRST + at + len(rows)))
        return index


def _embedded() -> Any:
    from ragserve.retrieval.embedder import Embedder

    return Embedder("all-MiniLM-L6-v2").encode(sentences(None, 4_000))


def _structure(kind: str, vectors: Any, ids: Any) -> Structure:
    """Build as a namespace's index is built, slab by slab."""
    structure = create(kind, vectors.shape[1], len(vectors), partial(_sample, vectors))
    for at in range(0, len(vectors), SLAB):
        structure.add(ids[at : at + SLAB], vectors[at : at + SLAB])
    return structure


def _sample(vectors: Any, most: int) -> Any:
    return np.ascontiguousarray(vectors[:: max(1, -(-len(vectors) // most))])


def _document(number: int, vectors: Any) -> tuple[NewDocument, list[NewChunk], Any]:
    chunks = [NewChunk(f"chunk {number + i}", 0, 12, 2) for i in range(len(vectors))]
    document = NewDocument(
        f"document {number}", f"Document {number}", "", "text/plain", 600, {"number": number}
    )
    return document, chunks, vectors


def _measured(make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what ``make`` returns, with its seconds and the growth of the process and of the GPU."""
    gc.collect()
    cuda, process = torch.cuda.is_available(), psutil.Process()
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    rss, started = process.memory_info().rss, time.perf_counter()
    made = make()
    figures = {
        "build_s": round(time.perf_counter() - started, 2),
        "rss MiB": round((process.memory_info().rss - rss) / 2**20),
    }
    if cuda:
        figures["gpu MiB"] = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
    return made, figures


def _timed(search: Search, queries: list[Any]) -> list[float]:
    """Milliseconds of each call."""
    times = []
    for query in queries:
        started = time.perf_counter()
        search(query)
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _latency(times: list[float]) -> dict[str, Any]:
    return {
        "p50 ms": round(percentile(times, 50), 3),
        "p99 ms": round(percentile(times, 99), 3),
        "singles": len(times),
    }


def _compared(ours: list[Any], others: list[Any]) -> dict[str, Any]:
    """The share of equal ids at equal places, and the largest difference of scores."""
    equal = [(a[1] == b[1]).mean() for a, b in zip(ours, others, strict=True)]
    apart = max(float(np.abs(a[0] - b[0]).max()) for a, b in zip(ours, others, strict=True))
    return {"same ids": round(float(min(equal)), 5), "score difference": float(f"{apart:.1e}")}


if __name__ == "__main__":
    main()
