"""How often questions are marked that the documents do not answer, and questions that they do.

    python -m benchmarks.not_found SETS_FOLDER VECTORS_FOLDER [--out FILE] [--fit]

The passages of each set (squad10, qed10, musique, 2wikimqa) are a namespace. Every question is asked of it
three times: as it is (``answerable``, if one of its gold passages is among the five best), without its gold
passages (``gold out``: others of the same subject stay), and of the next set's namespace (``another
subject``). Weights were fitted on the first halves, and the threshold set so that 2 % of their answerable
questions are marked: ``--fit`` does it again and prints them. Shares in percent that are marked, with 95 %
Wilson intervals. VECTORS_FOLDER keeps the passages' vectors for the next run; without them this takes some
minutes."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.places import RESULTS
from benchmarks.lib.set_namespaces import SetNamespace
from ragserve.eval.data import Question, find, load
from ragserve.retrieval.evidence import DEPTH, Signals, judged, signals, words_of
from ragserve.setting_groups.answering import Retrieval
from ragserve.verification.report import write
from ragserve_index import IndexStore
from ragserve_index.types import Hit

OUT = RESULTS / "not-found.json"
SETS = ("squad10", "qed10", "musique", "2wikimqa")
MODES: tuple[Retrieval, ...] = ("dense", "hybrid", "lexical")
KINDS = ("answerable", "gold out", "another subject")
NOTE = (
    "Marked, percent, 95 % Wilson intervals. Second halves and everything of 'another subject' chose nothing."
)
_SEARCHED = 30  # hits, of which the gold ones may go


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, as one of `KINDS`, and its signals."""

    set: str
    half: str
    mode: Retrieval
    kind: str
    signals: Signals
    missing: Sequence[str]


def judge(
    space: SetNamespace, question: str, hits: Sequence[Hit], mode: Retrieval
) -> tuple[Signals, list[str]] | None:
    """The signals of the best hits; None of too few."""
    if len(hits) < DEPTH:
        return None
    return signals(hits[:DEPTH], mode, space.store.word_counts(space.name, words_of(question)), space.n)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", type=Path)
    parser.add_argument("vectors", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    options.vectors.mkdir(parents=True, exist_ok=True)
    questions = {name: load(find(name, options.sets)) for name in SETS}
    with tempfile.TemporaryDirectory() as folder, IndexStore(Path(folder)) as store:
        spaces = {name: SetNamespace(name, questions[name], store, options.vectors) for name in SETS}
        asked = [each for mode in MODES for each in every(questions, spaces, mode)]
        embedder = spaces[SETS[0]].embedder.name
    if options.fit:
        for mode in MODES:
            fit(mode, [each for each in asked if each.mode == mode])
    rows = [
        row(mode, name, half, kind, asked, embedder)
        for mode in MODES
        for name in SETS
        for half in ("first", "second")
        for kind in KINDS
    ]
    sizes = {name: space.n for name, space in spaces.items()}
    write("not-found", {"embedder": embedder, "passages": sizes}, rows, out=options.out, note=NOTE)
    return 0


def every(
    questions: dict[str, list[Question]], spaces: dict[str, SetNamespace], mode: Retrieval
) -> Iterator[Asked]:
    """All questions of all sets, of each kind."""
    for place, name in enumerate(SETS):
        other = spaces[SETS[(place + 1) % len(SETS)]]
        for number, each in enumerate(questions[name]):
            half = "first" if number < (len(questions[name]) + 1) // 2 else "second"
            gold = {document.key for document in each.gold}
            hits = spaces[name].hits(each.question, mode, _SEARCHED)
            without = [hit for hit in hits if hit.chunk.source not in gold]
            is_there = any(hit.chunk.source in gold for hit in hits[:DEPTH])
            found = {
                "answerable": judge(spaces[name], each.question, hits, mode) if is_there else None,
                "gold out": judge(spaces[name], each.question, without, mode),
                "another subject": judge(other, each.question, other.hits(each.question, mode, DEPTH), mode),
            }
            for kind, judgement in found.items():
                if judgement is not None:
                    yield Asked(name, half, mode, kind, *judgement)


def fit(mode: Retrieval, asked: Sequence[Asked]) -> None:
    """Print weights for the first halves."""
    from sklearn.linear_model import LogisticRegression

    own = [each for each in asked if each.half == "first" and each.kind != "another subject"]
    x = np.array([each.signals for each in own])
    y = np.array([each.kind == "answerable" for each in own])
    if mode == "lexical":
        x[:, 0] = 0.0
    mean, deviation = x.mean(0), np.maximum(x.std(0), 1e-9)
    found = LogisticRegression(max_iter=1000).fit((x - mean) / deviation, y)
    weights = found.coef_[0] / deviation
    single = np.array([each.set in ("squad10", "qed10") for each in own])
    least = float(np.quantile((x @ weights)[y & single], 0.02))
    print(mode, [round(float(each), 2) for each in (*weights, -least)])


def row(
    mode: Retrieval, name: str, half: str, kind: str, asked: Sequence[Asked], embedder: str
) -> dict[str, Any]:
    own = [e for e in asked if (e.mode, e.set, e.half, e.kind) == (mode, name, half, kind)]
    marked = sum(judged(e.signals, e.missing, embedder, mode).score < 0 for e in own)
    low, high = wilson(marked, len(own))
    return {
        "search": mode,
        "set": name,
        "half": half,
        "kind": kind,
        "n": len(own),
        "marked": round(100 * marked / max(1, len(own)), 1),
        "95 %": [round(100 * low, 1), round(100 * high, 1)],
    }


def wilson(part: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not n:
        return 0.0, 1.0
    z, p = 1.96, part / n
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)


if __name__ == "__main__":
    sys.exit(main())
