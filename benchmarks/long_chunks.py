"""Quality of a dense search over chunks that the embedder cannot read at once: by their beginning, and by
windows whose vectors are averaged or whose largest components are taken.

    python -m benchmarks.long_chunks COLLECTION ... [--out FOLDER] [--quick]

Long chunks are passages of a collection in a row, as many as take three windows. A chunk is relevant if one
of its passages is."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.places import RESULTS
from ragserve.bench import beir
from ragserve.eval.ir_metrics import ndcg, recall
from ragserve.verification import report

_DEPTH = 10
_WINDOWS = 2  # that a chunk exceeds


def run(out_dir: Path | None, *, quick: bool = False, data: Sequence[Path]) -> dict[str, Any]:
    """Measure nDCG@10 and recall@10 per collection. ``quick``: the first 50 queries."""
    from ragserve.retrieval.embedder import Embedder

    embedder = Embedder()
    rows: list[dict[str, Any]] = []
    for folder in data:
        rows += _measure(beir.load(folder, max_queries=50 if quick else None), embedder)
    return report.write(
        "long-chunks",
        {"depth": _DEPTH, "embedder": embedder.name, "queries": "first 50" if quick else "all"},
        rows,
        out=out_dir / "long-chunks.json" if out_dir else None,
        note="beginning: what the embedder reads at once. windows: pieces of equal length, each read whole. "
        "nDCG: the gain of a chunk is the highest of its passages.",
    )


def _measure(collection: beir.Collection, embedder: Any) -> list[dict[str, Any]]:
    groups = _groups(collection, embedder)
    chunks = ["\n\n".join(collection.passage(doc_id) for doc_id in group) for group in groups]
    windows = [embedder.windows(chunk) for chunk in chunks]
    vectors = embedder.encode([window for own in windows for window in own])
    starts = np.cumsum([0, *(len(own) for own in windows[:-1])])
    systems = {
        # the default embedder has no prompts, and questions are not cut into windows
        "beginning": embedder.encode_queries(chunks),
        "mean of windows": np.add.reduceat(vectors, starts),
        "largest of windows": np.maximum.reduceat(vectors, starts),
    }
    chunk_of = {doc_id: str(number) for number, group in enumerate(groups) for doc_id in group}
    judged: dict[str, dict[str, int]] = {}
    for query, gains in collection.judged.items():
        own = judged.setdefault(query, {})
        for doc_id, gain in gains.items():
            own[chunk_of[doc_id]] = max(gain, own.get(chunk_of[doc_id], 0))
    queries = embedder.encode_queries(list(collection.queries.values()))
    rows = []
    for system, found in systems.items():
        unit = found / np.linalg.norm(found, axis=1, keepdims=True)
        best = np.argsort(-queries @ unit.T, axis=1, kind="stable")[:, :_DEPTH]
        rankings = dict(zip(collection.queries, best.astype(str).tolist(), strict=True))
        rows.append(
            {
                "collection": collection.name,
                "chunks": len(chunks),
                "windows": round(len(vectors) / len(chunks), 2),
                "queries": len(rankings),
                "embedded": system,
                "ndcg@10": round(
                    statistics.fmean(ndcg(r, judged[q], _DEPTH) for q, r in rankings.items()), 4
                ),
                "recall@10": round(
                    statistics.fmean(recall(r, judged[q], _DEPTH) for q, r in rankings.items()), 4
                ),
            }
        )
    return rows


def _groups(collection: beir.Collection, embedder: Any) -> list[list[str]]:
    """Passages in a row, until they take more than two windows."""
    groups: list[list[str]] = [[]]
    text = ""
    for doc_id in collection.documents:
        groups[-1].append(doc_id)
        text += collection.passage(doc_id) + "\n\n"
        if len(embedder.windows(text)) > _WINDOWS:
            groups.append([])
            text = ""
    return [group for group in groups if group]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="+", help="a folder in BEIR's layout")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures prove nothing")
    given = parser.parse_args()
    run(given.out, quick=given.quick, data=given.data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
