"""Documents a second of `ragserve ingest` with its own processes and with Ray on this machine, in turns.

    python examples/ingest_ray.py ARTICLES.jsonl.xz [--articles 190] [--runs 3] [--out examples/results]

ARTICLES has {title, text} a line. Each run ingests the same files into a new data folder; the starts of the
embedder and of Ray count. Needs Ray (`pip install 'ragserve[ray]'`, or `scripts/install --ray`). Ends with an
error unless every run has indexed the same chunks."""

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
from pathlib import Path
from typing import Any

from ragserve.measuring import report
from ragserve_index import IndexStore

BESIDE = Path(__file__).parents[1] / ".venv" / "ray"
WAYS: dict[str, tuple[str, ...]] = {"own processes": (), "Ray": ("--ray", "local")}
NOTE = (
    "Seconds of the whole command, the starts of the embedder and of Ray included; runs in turns. times own "
    "processes: of the medians."
)


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
    found: set[tuple[int, str]] = set()
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(given.articles_file, given.articles, Path(folder, "files"))
        for run in range(given.runs):
            for way, options in WAYS.items():
                data = Path(folder, f"{way}-{run}".replace(" ", "-"))
                seconds[way].append(ingest(files, data, options))
                found.add(indexed(data))
                print(f"{way}: {seconds[way][-1]} s", flush=True)
    if len(found) != 1:
        raise SystemExit(f"the runs have indexed different chunks: {found}")
    chunks, _ = found.pop()
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


def indexed(data: Path) -> tuple[int, str]:
    """The number of chunks, and a hash of their texts and places, whatever their order."""
    every: list[Any] = []
    with IndexStore(data) as store:
        for document in store.documents("default"):
            chunks = store.document_chunks("default", document.doc_id)
            every += [(Path(document.source).name, each.start, each.end, each.text) for each in chunks]
    return len(every), hashlib.sha256(json.dumps(sorted(every)).encode()).hexdigest()


if __name__ == "__main__":
    main()
