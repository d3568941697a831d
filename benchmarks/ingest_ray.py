"""Documents a second of `ragserve ingest` with its own processes and with Ray on this machine, in turns.

    python -m benchmarks.ingest_ray ARTICLES.jsonl.xz [--articles 190] [--runs 3] [--out FILE.json]

ARTICLES has {title, text} a line. Each run ingests the same files into a new data folder, and the next one
begins with the other way; the starts of the embedder and of Ray count. Needs Ray (`pip install
'ragserve[ray]'`, or `scripts/install --ray`). Ends with an error unless every run has indexed the same chunks
of all articles, and finds the same ones with the same scores."""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib.places import REPO
from ragserve.ingest.prune import every_document
from ragserve.verification import report
from ragserve_index import IndexStore

BESIDE = REPO / ".venv" / "ray"
WAYS: dict[str, tuple[str, ...]] = {"own processes": (), "Ray": ("--ray", "local")}
NOTE = (
    "Seconds of the whole command, the starts of the embedder and of Ray included; runs in turns, of which "
    "each begins with the other way. All have indexed the same chunks, and find them with the same scores. "
    "times own processes: of the medians. Goal: at least 0.9."
)
QUERIES, HITS = 16, 10
SAME_SCORE = 1e-4  # batches of another size change a vector's last bits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("articles_file", type=Path)
    parser.add_argument("--articles", type=int, default=190)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    found: list[Indexed] = []
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(given.articles_file, given.articles, Path(folder, "files"))
        for run in range(given.runs):
            for way, options in list(WAYS.items())[:: -1 if run % 2 else 1]:
                data = Path(folder, f"{way}-{run}".replace(" ", "-"))
                seconds[way].append(ingest(files, data, options))
                found.append(indexed(data))
                print(f"{way}: {seconds[way][-1]} s", flush=True)
                if not found[-1].same_as(found[0]):
                    raise SystemExit(f"{way} has indexed something else than {next(iter(WAYS))}")
    if found[0].documents != given.articles:
        raise SystemExit(f"of {given.articles} articles, {found[0].documents} are indexed")
    chunks = found[0].chunks
    usual = statistics.median(seconds["own processes"])
    rows = [
        {
            "way": way,
            "seconds": taken,
            "documents/s": round(given.articles / statistics.median(taken), 2),
            "chunks/s": round(chunks / statistics.median(taken), 1),
            "times own processes": round(usual / statistics.median(taken), 3),
        }
        for way, taken in seconds.items()
    ]
    workload = {"articles": given.articles, "chunks": chunks, "runs": given.runs}
    report.write("ingest-ray", workload, rows, out=given.out, note=NOTE)


def write_files(articles: Path, count: int, folder: Path) -> Path:
    """Write the first articles as text files, and return their folder."""
    folder.mkdir()
    with lzma.open(articles, "rt", encoding="utf-8") as lines:
        for number, line in zip(range(count), lines, strict=False):
            article = json.loads(line)
            text = f"{article['title']}\n\n{article['text']}\n"
            (folder / f"{number:05}.txt").write_text(text, encoding="utf-8")
    return folder


def ingest(files: Path, data: Path, options: tuple[str, ...]) -> float:
    """Return the seconds of one command; ends the script if that fails."""
    path = [*sys.path, *([str(BESIDE)] if BESIDE.is_dir() else ())]
    command = [sys.executable, "-m", "ragserve.cli", "ingest", str(files), "--data-dir", str(data), "--json"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"ragserve ingest {' '.join(options)} failed:\n{done.stderr[-2000:]}")
    return round(time.monotonic() - started, 1)


@dataclass(frozen=True)
class Indexed:
    """What an index holds, whatever the order in which it came.

    Attributes:
        digest: Hash of the chunks' files, places and texts.
        hits: For each of `QUERIES` drawn vectors, the files and places of the nearest chunks.
        scores: Their scores, float32 ``[QUERIES, HITS]``.
    """

    documents: int
    chunks: int
    digest: str
    hits: list[list[tuple[str, int]]]
    scores: np.ndarray

    def same_as(self, other: Indexed) -> bool:
        exact = (self.documents, self.chunks, self.digest) == (other.documents, other.chunks, other.digest)
        return exact and self.hits == other.hits and np.allclose(self.scores, other.scores, atol=SAME_SCORE)


def indexed(data: Path) -> Indexed:
    with IndexStore(data) as store:
        documents = list(every_document(store, "default"))
        every = sorted(
            (Path(document.source).name, each.start, each.end, each.text)
            for document in documents
            for each in store.document_chunks("default", document.doc_id)
        )
        drawn = np.random.default_rng(0).standard_normal((QUERIES, store.namespace("default").dim))
        queries = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
        found = store.search("default", queries, HITS).hits
    digest = hashlib.sha256(json.dumps(every).encode()).hexdigest()
    hits = [[(Path(hit.chunk.source).name, hit.chunk.start) for hit in row] for row in found]
    scores = np.array([[hit.score for hit in row] for row in found], dtype=np.float32)
    return Indexed(len(documents), len(every), digest, hits, scores)


if __name__ == "__main__":
    main()
