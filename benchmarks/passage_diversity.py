"""Whether diversity in the choice of k passages finds more of those that a question needs.

    python -m benchmarks.passage_diversity SETS_FOLDER VECTORS_FOLDER [--out FILE]

The passages of each set are a namespace. ``at most n``: of a document (a title) n passages come first, the
others behind all of them. ``MMR w``: maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998) over
the 50 best, w times the score, from 0 to 1, less (1 - w) times the largest cosine to one that is taken. A row
has the share of questions whose gold passages are all among the k best, in percent, and the paired difference
to the search's own order with its 95 % interval."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.places import RESULTS
from benchmarks.lib.set_namespaces import SetNamespace
from ragserve.eval.data import Question, find, load
from ragserve.setting_groups.answering import Retrieval
from ragserve.verification.report import write
from ragserve_index import IndexStore
from ragserve_index.types import Hit

OUT = RESULTS / "passage-diversity.json"
SETS = ("squad10", "qed10", "musique", "2wikimqa")
MODES: tuple[Retrieval, ...] = ("dense", "hybrid", "lexical")
KS = (5, 10, 20)
NOTE = (
    "All gold passages among the k best, percent; difference to the search's own order, +- its 95 % interval."
)
_DEPTH, _CHOSEN = 100, 50
Order = Callable[[SetNamespace, Sequence[Hit]], list[str]]


def as_found(space: SetNamespace, hits: Sequence[Hit]) -> list[str]:
    return [hit.chunk.source for hit in hits]


def at_most(n: int, space: SetNamespace, hits: Sequence[Hit]) -> list[str]:
    """The order with at most ``n`` passages of a document before all others."""
    seen: Counter[str] = Counter()
    first, rest = list[str](), list[str]()
    for hit in hits:
        (first if seen[hit.chunk.title] < n else rest).append(hit.chunk.source)
        seen[hit.chunk.title] += 1
    return first + rest


def mmr(weight: float, space: SetNamespace, hits: Sequence[Hit]) -> list[str]:
    """The order by maximal marginal relevance."""
    names = [hit.chunk.source for hit in hits[:_CHOSEN]]
    if len(names) < 2:
        return names
    scores = np.array([hit.score for hit in hits[:_CHOSEN]])
    scores = (scores - scores.min()) / (np.ptp(scores) or 1.0)
    vectors = np.array([space.vectors[name] for name in names])
    alike = vectors @ vectors.T
    taken = [int(scores.argmax())]
    while len(taken) < min(len(names), max(KS)):
        left = weight * scores - (1 - weight) * alike[:, taken].max(1)
        left[taken] = -np.inf
        taken.append(int(left.argmax()))
    return [names[place] for place in taken]


ORDERS: dict[str, Order] = {
    "as found": as_found,
    **{f"at most {n}": partial(at_most, n) for n in (1, 2, 3)},
    **{f"MMR {weight}": partial(mmr, weight) for weight in (0.9, 0.7, 0.5)},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", type=Path)
    parser.add_argument("vectors", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.vectors.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, IndexStore(Path(folder)) as store:
        for name in SETS:
            questions = load(find(name, options.sets))
            space = SetNamespace(name, questions, store, options.vectors)
            for mode in MODES:
                rows += measured(space, questions, mode)
    write("passage-diversity", {"questions": "all of each set"}, rows, out=options.out, note=NOTE)
    return 0


def measured(space: SetNamespace, questions: Sequence[Question], mode: Retrieval) -> list[dict[str, Any]]:
    """A row for each order."""
    hits = [space.hits(each.question, mode, _DEPTH) for each in questions]
    gold = [{document.key for document in each.gold} for each in questions]
    rows, own = list[dict[str, Any]](), dict[int, np.ndarray]()
    for name, order in ORDERS.items():
        orders = [order(space, each) for each in hits]
        row: dict[str, Any] = {"set": space.name, "search": mode, "order": name, "n": len(questions)}
        for k in KS:
            found = np.array([want <= set(got[:k]) for want, got in zip(gold, orders, strict=True)], float)
            change = found - own.setdefault(k, found)
            row[f"k={k}"] = round(100 * float(found.mean()), 1)
            row[f"k={k} change"] = round(100 * float(change.mean()), 1)
            row[f"k={k} +-"] = round(196 * float(change.std()) / len(found) ** 0.5, 1)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
