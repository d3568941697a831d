"""Lexical search at scale: time and quality beside FTS5's own ranking of the same table.

The passages of a collection in BEIR's layout, whose questions are asked, stand among chunks of 150 words
from articles. A chunk joins two pieces of 75 words, drawn with a fixed seed, so any number of chunks can be
made of real text; a rare word of the articles is then in more chunks than it would be in as much text that
nobody had repeated.

The rival is FTS5 asked for all words of the question in the order of its BM25, which scores every chunk that
has one of them. Both are asked in turn, one question at a time."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ragserve.bench import beir
from ragserve.errors import InvalidRequest
from ragserve.eval.ir_metrics import ndcg
from ragserve.json_lines import json_lines
from ragserve.verification.report import GrowingReport, percentile

_K = 10
_PIECE_WORDS = 75
_CHUNKS_PER_DOCUMENT = 20
_DOCUMENTS_PER_BATCH = 100
_NAMESPACE = "bench"
_HINT = (
    "Give --data DIR, a folder in BEIR's layout, and --data FILE, articles of {title, text} (.jsonl[.xz])."
)
_NOTE = (
    "ms: CPU time of the searching thread, one question at a time, rows of the hits included. same: share of "
    "the documents among FTS5's 10 that are found. all words, FTS5: every chunk with a word of the question "
    "is scored. build_s: registry, vector log and lexical indexes, by the clock; MB: the registry's file and "
    "tantivy's index where there is one."
)


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    data: Sequence[Path] = (),
    sizes: Sequence[int] = (10_000, 100_000, 1_000_000),
    n_queries: int = 120,
) -> dict[str, Any]:
    """Measure a row per size and system; the JSON is rewritten after each. ``quick``: 1,000 chunks.

    Raises InvalidRequest without a collection and articles."""
    folders = [path for path in data if path.is_dir()]
    pieces = [piece for path in data if not path.is_dir() for piece in _pieces(path)]
    if len(folders) != 1 or not pieces:
        raise InvalidRequest("bench lexical needs one collection and articles.", hint=_HINT)
    collection = beir.load(folders[0])
    step = max(1, len(collection.queries) // n_queries)
    asked = dict(list(collection.queries.items())[::step])
    report = GrowingReport("lexical", out_dir / "lexical.json" if out_dir else None, note=_NOTE)
    report.workload = {
        "k": _K,
        "chunks": f"two of {len(pieces):,} pieces of {_PIECE_WORDS} words",
        "questions": f"{len(asked)} of {collection.name}, whose {len(collection.documents)} passages are "
        "among the chunks",
    }
    for size in (1_000,) if quick else sorted(sizes):
        for row in _rows_of(size, pieces, collection, asked):
            report.add(row)
    return report.show()


def _pieces(path: Path) -> Iterator[tuple[str, str]]:
    for _, article in json_lines(path, _HINT):
        words = article["text"].split()
        for at in range(0, len(words), _PIECE_WORDS):
            yield article["title"], " ".join(words[at : at + _PIECE_WORDS])


def _rows_of(
    size: int, pieces: Sequence[tuple[str, str]], collection: beir.Collection, asked: dict[str, str]
) -> Iterator[dict[str, Any]]:
    from ragserve_index import IndexStore
    from ragserve_index.database import lexical_table
    from ragserve_index.lexical_search import MAX_WORDS
    from ragserve_index.word_cutting import distinct_words

    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder, IndexStore(Path(folder)) as store:
        store.ensure_namespace(_NAMESPACE, embedder="bench", dim=2)
        started = time.perf_counter()
        _write(store, size, pieces, collection)
        store.save(_NAMESPACE)
        build_s = time.perf_counter() - started
        files = [store.data_dir / "ragserve.sqlite3", *store.data_dir.glob("indexes/*.words/*")]
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        name = lexical_table(1)

        def ours(text: str) -> list[str]:
            return [hit.chunk.source for hit in store.search_text(_NAMESPACE, text, _K).hits[0]]

        def theirs(text: str) -> list[str]:
            with store.database.read() as connection:
                ids = connection.execute(
                    f"SELECT rowid FROM {name} WHERE {name} MATCH ? ORDER BY rank LIMIT ?",
                    (" OR ".join(f'"{word}"' for word in distinct_words(text, MAX_WORDS)), _K),
                ).fetchall()
            return [chunk.source for chunk in store.chunks(_NAMESPACE, [row[0] for row in ids])]

        found: dict[str, dict[str, list[str]]] = {"ours": {}, "theirs": {}}
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        searches: dict[str, Callable[[str], list[str]]] = {"ours": ours, "theirs": theirs}
        for text in asked.values():  # count frequent words, fill the page cache
            ours(text)
        for query, text in asked.items():
            for side, search in searches.items():
                started = time.thread_time()
                found[side][query] = search(text)
                times[side].append((time.thread_time() - started) * 1e3)
        for side, label in (("ours", "ragserve"), ("theirs", "all words, FTS5")):
            truth = {query: set(names) for query, names in found["theirs"].items()}
            same = [len(truth[q] & {*found[side][q]}) / max(1, len(truth[q])) for q in asked]
            quality = [ndcg(found[side][q], collection.judged[q], _K) for q in asked]
            yield {
                "chunks": size + len(collection.documents),
                "system": label,
                "ndcg@10": round(statistics.fmean(quality), 4),
                "same": round(statistics.fmean(same), 3),
                "ms_p50": round(percentile(times[side], 50), 2),
                "ms_p90": round(percentile(times[side], 90), 2),
                "build_s": round(build_s, 1),
                "MB": round(megabytes),
            }


def _write(store: Any, size: int, pieces: Sequence[tuple[str, str]], collection: beir.Collection) -> None:
    """Write ``size`` made chunks, and each passage of the collection as a document of its own."""
    import numpy as np

    from ragserve_index.types import NewChunk, NewDocument

    chance = random.Random(0)

    def document(source: str, title: str, texts: Sequence[str]) -> tuple[Any, ...]:
        chunks = [NewChunk(text, 0, len(text), len(text.split())) for text in texts]
        vectors = np.tile(np.array([1, 0], dtype=np.float32), (len(texts), 1))
        return NewDocument(source, title, "", "text/plain", sum(map(len, texts))), chunks, vectors

    def documents() -> Iterator[tuple[Any, ...]]:
        for at in range(0, size, _CHUNKS_PER_DOCUMENT):
            drawn = [
                (chance.choice(pieces), chance.choice(pieces))
                for _ in range(min(_CHUNKS_PER_DOCUMENT, size - at))
            ]
            texts = [f"{first[1]} {second[1]}" for first, second in drawn]
            yield document(f"articles {at}", drawn[0][0][0], texts)
        for name, (title, text) in collection.documents.items():
            yield document(name, title, [text])

    batch: list[Any] = []
    for one in documents():
        batch.append(one)
        if len(batch) == _DOCUMENTS_PER_BATCH:
            store.replace_documents(_NAMESPACE, batch)
            batch = []
    store.replace_documents(_NAMESPACE, batch)
