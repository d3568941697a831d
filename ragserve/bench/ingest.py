"""Ingestion end to end beside embedding alone: the cost of parsing, chunking, indexing and bookkeeping.

Both sides embed the same chunks with the same embedder in the same process, alternately. End to end starts
with files on disk and ends with a committed index. The figure that counts is the share: end to end /
embedding alone, in chunks a second."""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ragserve.config import Settings, load
from ragserve.errors import InvalidRequest
from ragserve.json_lines import json_lines
from ragserve.verification import report

_CORPUS = Path(__file__).resolve().parents[2] / "examples" / "corpus" / "files"


def run(
    out_dir: Path | None, *, quick: bool = False, texts: Path | None = None, copies: int = 3, rounds: int = 3
) -> dict[str, Any]:
    """Ingest ``copies`` of the example corpus under distinct names, or the articles of ``texts`` ({title,
    text} as .jsonl or .jsonl.xz).

    The two sides alternate for ``rounds``, and medians are reported. ``quick``: 8 files, one round. Raises
    InvalidRequest if there are no documents."""
    from ragserve.retrieval.embedder import Embedder

    settings = load()
    embedder = Embedder.of(settings)
    embedder.encode(["warm up"] * settings.embed_batch)
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder:
        source = Path(folder) / "documents"
        source.mkdir()
        if texts:
            _write_articles(texts, source, 20 if quick else 400)
        else:
            _copy_corpus(source, copies, quick)
        n_files = len(list(source.iterdir()))
        if not n_files:
            raise InvalidRequest(f"No documents in {texts or _CORPUS}.")
        whole, alone = [], []
        stored: list[str] = []
        for turn in range(1 if quick else rounds):
            done = _end_to_end(settings, embedder, source, Path(folder) / f"data{turn}")
            whole.append(done)
            stored = done.pop("texts")
            started = time.perf_counter()
            embedder.encode(stored)
            alone.append(time.perf_counter() - started)
    chunks, tokens = len(stored), whole[0]["tokens"]
    seconds = statistics.median(one["seconds"] for one in whole)
    embedding = statistics.median(alone)
    rows = [
        _row("embedding alone", embedding, n_files, chunks, tokens, embedding),
        _row("ragserve ingest", seconds, n_files, chunks, tokens, embedding),
        {"what": "  of it embedding", "seconds": statistics.median(one["embed_s"] for one in whole)},
        {"what": "  of it writing the index", "seconds": statistics.median(one["index_s"] for one in whole)},
    ]
    workload = {
        "documents": texts.name if texts else "examples/corpus",
        "files": n_files,
        "chunks": chunks,
        "tokens": tokens,
        "embedder": embedder.name,
        "rounds": len(whole),
    }
    note = (
        "Parsing runs in its own process beside embedding; models were loaded before. "
        "Goal: at least 80 % of embedding alone."
    )
    return report.write("ingest", workload, rows, out=out_dir / "ingest.json" if out_dir else None, note=note)


def _row(what: str, seconds: float, files: int, chunks: int, tokens: int, embedding: float) -> dict[str, Any]:
    return {
        "what": what,
        "seconds": seconds,
        "chunks/s": chunks / seconds,
        "tokens/s": tokens / seconds,
        "files/s": files / seconds,
        "share of embedding alone %": 100 * embedding / seconds,
    }


def _end_to_end(settings: Settings, embedder: Any, source: Path, data_dir: Path) -> dict[str, Any]:
    """Ingest into a fresh data directory. Returns the timings, and the texts that were embedded, for the
    other side."""
    from ragserve.ingest.chunk_embedding import embedding_text
    from ragserve.ingest.ingestor import Ingestor, PathOptions
    from ragserve.ingest.prune import every_document
    from ragserve_index import IndexStore

    with IndexStore(data_dir) as store:
        ingestor = Ingestor(settings.model_copy(update={"data_dir": data_dir}), store, embedder)
        started = time.perf_counter()
        job = ingestor.submit_paths("bench", [str(source)], PathOptions(recursive=True))
        result = ingestor.run(job.job_id)
        seconds = time.perf_counter() - started
        texts = [
            embedding_text(document.title, chunk.text)
            for document in every_document(store, "bench")
            for chunk in store.document_chunks("bench", document.doc_id)
        ]
    shutil.rmtree(data_dir)
    figures = {name: getattr(result.progress, name) for name in ("embed_s", "index_s", "tokens")}
    return {"seconds": seconds, "texts": texts, **figures}


def _copy_corpus(target: Path, copies: int, quick: bool) -> None:
    files = sorted(_CORPUS.iterdir())[:: 5 if quick else 1]
    for number in range(1 if quick else copies):
        for file in files:
            shutil.copyfile(file, target / f"{number}-{file.name}")


def _write_articles(texts: Path, target: Path, limit: int) -> None:
    for n, (_, article) in enumerate(itertools.islice(json_lines(texts), limit), 1):
        (target / f"{n:06d}.md").write_text(f"# {article['title']}\n\n{article['text']}\n", encoding="utf-8")
