"""What labels cost a search: a key that sees part of a namespace against one that sees all of it.

    python -m benchmarks.label_cost [--chunks 100000] [--out FILE]

Documents of 10 chunks with 384 components and 40 words drawn by Zipf's law, first without labels, then half
of them with one. The rival is the same search by a viewer that sees everything, on the same store, in turns
with the others. ``at once``: the first search after a label has changed, in which nothing is cached. A row
also says how long a label takes to change, and what an unlabelled namespace's search costs a key. Times are
those of the processor, so that other work on the machine does not count. About three minutes on one core."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.places import RESULTS
from ragserve.verification.report import write
from ragserve_index import IndexStore, NewChunk, NewDocument
from ragserve_index.structures.base import load_faiss
from ragserve_index.viewers import EVERYTHING, UNLABELLED, Viewer

OUT = RESULTS / "label-cost.json"
NOTE = "CPU time: a search for 10 passages, median of n; at once: the first after a label has changed, of 3."
_SHARES = {(): 0.5, ("common",): 0.4, ("some",): 0.09, ("rare",): 0.01}
_VIEWERS = {
    "everything": EVERYTHING,
    "no label": UNLABELLED,
    "common": Viewer.holding(["common"]),
    "rare": Viewer.holding(["rare"]),
}
_LETTERS = str.maketrans("0123456789ABCDEFGHIJKLMNOP", "abcdefghijklmnopqrstuvwxyz")
_CHUNKS, _DIM, _WORDS, _VOCABULARY, _BATCH = 10, 384, 40, 50_000, 500
_NAMESPACE, _TURNS = "docs", 3


def fill(store: IndexStore, n: int) -> None:
    """Write ``n`` chunks without labels."""
    chance = np.random.default_rng(0)
    store.ensure_namespace(_NAMESPACE, embedder="random", dim=_DIM)
    for start in range(0, n // _CHUNKS, _BATCH):
        batch = []
        for number in range(start, min(start + _BATCH, n // _CHUNKS)):
            texts = [" ".join(words(chance, _WORDS)) for _ in range(_CHUNKS)]
            chunks = [NewChunk(text, 0, len(text), _WORDS) for text in texts]
            document = NewDocument(f"d{number}", f"d{number}", "0", "text/plain", 1)
            batch.append((document, chunks, unit(chance, _CHUNKS)))
        store.replace_documents(_NAMESPACE, batch)
    store.save(_NAMESPACE)


def label(store: IndexStore) -> None:
    """Give the documents their labels."""
    ids = np.array([document.doc_id for document in store.documents(_NAMESPACE, limit=10**9)])
    sets = list(_SHARES)
    of = np.random.default_rng(3).choice(len(sets), size=len(ids), p=list(_SHARES.values()))
    for number, labels in enumerate(sets):
        if labels:
            store.set_labels(_NAMESPACE, ids[of == number].tolist(), only=labels)


def words(chance: np.random.Generator, n: int) -> list[str]:
    ranks = np.minimum(chance.zipf(1.2, size=n), _VOCABULARY)
    return [np.base_repr(rank, 26).translate(_LETTERS) for rank in ranks]


def unit(chance: np.random.Generator, n: int) -> Any:
    rows = chance.standard_normal((n, _DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def searches(store: IndexStore) -> dict[str, Callable[[np.ndarray, str], Any]]:
    return {
        "dense": lambda vector, text: store.search(_NAMESPACE, vector, 10),
        "lexical": lambda vector, text: store.search_text(_NAMESPACE, text, 10),
        "hybrid": lambda vector, text: store.search_text(_NAMESPACE, text, 10, vector=vector[0]),
    }


def timed(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e3


def measured(store: IndexStore, n: int, viewers: dict[str, Viewer]) -> list[dict[str, Any]]:
    """A row for each search and viewer."""
    chance = np.random.default_rng(1)
    asked = [(unit(chance, 1), " ".join(words(chance, 8))) for _ in range(n)]
    rows = []
    for kind in ("dense", "lexical", "hybrid"):
        calls = {name: searches(store.seen_by(viewer))[kind] for name, viewer in viewers.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for question in [asked[0], *asked]:
            for name, call in calls.items():
                times[name].append(timed(lambda call=call, question=question: call(*question)))
        for name, own in times.items():
            chunks = store.seen_by(viewers[name]).namespace(_NAMESPACE).n_chunks
            rows.append(
                {
                    "search": kind,
                    "viewer": name,
                    "sees": chunks,
                    "ms": round(statistics.median(own[1:]), 2),
                    "p95 ms": round(float(np.quantile(own[1:], 0.95)), 2),
                    "n": n,
                }
            )
    return rows


def at_once(store: IndexStore, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Time the first searches after a label has changed into the rows; milliseconds of the changes."""
    chance = np.random.default_rng(2)
    doc = store.documents(_NAMESPACE, limit=1)[0].doc_id
    changes = []
    for row in rows:
        call = searches(store.seen_by(_VIEWERS[row["viewer"]]))[row["search"]]
        first = []
        for turn in range(_TURNS):
            label = [f"x{turn}"]
            changes.append(timed(lambda label=label: store.set_labels(_NAMESPACE, [doc], only=label)))
            question = unit(chance, 1), " ".join(words(chance, 8))
            first.append(timed(lambda call=call, question=question: call(*question)))
        row["at once ms"] = round(statistics.median(first), 2)
    return changes


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    load_faiss().omp_set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, IndexStore(Path(folder)) as store:
        fill(store, given.chunks)
        plain = {name: _VIEWERS[name] for name in ("everything", "no label")}
        unlabelled = measured(store, given.questions, plain)
        label(store)
        rows = measured(store, given.questions, _VIEWERS)
        changes = at_once(store, rows)
    change = round(statistics.median(changes), 2)
    every = [{"documents": "labelled", **row} for row in rows]
    every += [{"documents": "none labelled", **row} for row in unlabelled]
    workload = {"chunks": given.chunks, "label change ms": change}
    write("label-cost", workload, every, out=given.out, note=NOTE)


if __name__ == "__main__":
    main(sys.argv[1:])
