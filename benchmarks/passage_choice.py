"""Which passages to choose, and how many: how often all gold passages are among those that fill a share of
the document tokens, by the order in which they are taken.

    python -m benchmarks.passage_choice DATA ... --work FILE [--limit N] [--sentences N] [--out FILE]

DATA: question sets with gold passages, as for `ragserve eval`. Methods are chosen on the first half of each
set; the second half is reported beside it. ``--sentences``: questions of a half, spread evenly, that are
asked by methods that embed sentences. Vectors are kept in FILE; the same command goes on with them."""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.places import RESULTS
from ragserve.answering.prompt import PromptBuilder, load_tokenizer
from ragserve.best_passages import PassagesOptions, filled, standing_out
from ragserve.config import DEFAULT_MODEL
from ragserve.eval.data import Question, halved, load, set_name, spread
from ragserve.ingest.chunk_embedding import embedding_text
from ragserve.ingest.sentence_plan import SentencePlan
from ragserve.linked_passages import Ranking, linked
from ragserve.profiles.bounds import interval
from ragserve.retrieval.embedder import Embedder
from ragserve.verification import report

Floats = npt.NDArray[np.float32]
OUT = RESULTS / "passage-choice.json"
SHARES = (0.15, 0.25, 0.4)
ENOUGH = (2.0, 2.5, 3.0)
ADAPTIVE = "linked, adaptive"
NOTE = (
    "all_gold: percent of the questions whose gold passages are all chosen; interval: 95 % of the "
    "mean; vs_embedder: points above the embedder's order on the same questions. tokens: percent of the "
    "document tokens chosen, mean. share: the budget. gold first: what fits. same_tokens: a fixed budget of "
    "as many tokens as the adaptive one took in this set and half. cpu_ms: median CPU milliseconds of "
    "the choice; vectors of the question, the passages and their sentences are there."
)


class Vectors:
    """Embeds texts once, and keeps the vectors in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._embedder, self._known = path, Embedder(), dict[str, Floats]()
        if path.exists():
            with np.load(path) as kept:
                self._known = dict(
                    zip(kept["keys"].tolist(), kept["vectors"].astype(np.float32), strict=True)
                )

    def of(self, texts: Sequence[str], *, queries: bool = False) -> Floats:
        """Float32 [len(texts), dim]."""
        keys = [
            f"{'q' if queries else 'p'}{hashlib.sha256(text.encode()).hexdigest()[:24]}" for text in texts
        ]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}
        if new:
            encode = self._embedder.encode_queries if queries else self._embedder.encode
            self._known.update(zip(new, encode(list(new.values())), strict=True))
        return np.stack([self._known[key] for key in keys])

    def fresh(self, query: str) -> Floats:
        """Embed a query that only a method makes, and keep nothing: it is part of the method's time."""
        vector: Floats = self._embedder.encode_queries([query])[0]
        return vector

    def keep(self) -> None:
        """Write the file."""
        vectors = np.stack(list(self._known.values())).astype(np.float16)
        np.savez(self._path, keys=np.array(list(self._known)), vectors=vectors)


@dataclass
class Case:
    """A question with what the methods read; passages in the order of the set."""

    asked: Question
    sizes: list[int]
    vectors: Vectors

    @cached_property
    def texts(self) -> list[tuple[str, str]]:
        return [(each.title, each.text) for each in self.asked.documents]

    @cached_property
    def question(self) -> Floats:
        return self.vectors.of([self.asked.question], queries=True)[0]

    @cached_property
    def passages(self) -> Floats:
        return self.vectors.of([embedding_text(*each) for each in self.texts])

    @cached_property
    def cosines(self) -> Floats:
        return self.passages @ self.question

    @cached_property
    def matches(self) -> list[float]:
        import bm25s

        index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        tokens = bm25s.tokenize([embedding_text(*each) for each in self.texts], show_progress=False)
        index.index(tokens, show_progress=False)
        asked = bm25s.tokenize([self.asked.question], show_progress=False, return_ids=False)[0]
        return [float(score) for score in index.get_scores(asked)]

    @cached_property
    def sentences(self) -> list[list[str]]:
        return [SentencePlan([(text, len(text))], 1, 2**30).texts for _, text in self.texts]

    @cached_property
    def sentence_vectors(self) -> list[Floats]:
        return [self.vectors.of(own) for own in self.sentences]

    @property
    def gold(self) -> set[int]:
        return {number for number, each in enumerate(self.asked.documents) if each in self.asked.gold}


def by(scores: Any) -> list[int]:
    """Numbers by falling score."""
    return [int(number) for number in (-np.asarray(scores)).argsort(kind="stable")]


def fused(case: Case) -> list[int]:
    """Reciprocal rank fusion of embedder and BM25."""
    places = [np.argsort(by(scores)) for scores in (case.cosines, case.matches)]
    return by(sum(1 / (61 + place) for place in places))


def nearest_sentence(case: Case, mixed: bool) -> list[int]:
    """By the nearest sentence of each passage, or the mean of that and the passage's cosine."""
    best = np.array([(own @ case.question).max() for own in case.sentence_vectors])
    return by(best + case.cosines if mixed else best)


def second_hop(case: Case, whole: bool) -> list[int]:
    """Greedy: by the larger cosine of the question, and of the question with the nearest sentence of each of
    the two best passages, or with these whole."""
    score, order = case.cosines.copy(), list[int]()
    for _ in case.sizes:
        rest = score.copy()
        rest[order] = -np.inf
        order.append(int(rest.argmax()))
        if len(order) <= 2:
            number = order[-1]
            own = case.sentence_vectors[number] @ case.question
            added = case.texts[number][1] if whole else case.sentences[number][int(own.argmax())]
            hop = case.vectors.fresh(f"{case.asked.question} {case.texts[number][0]} {added}")
            near = case.passages @ hop
            near[number] = -1.0
            score = np.maximum(score, near)
    return order


def rank(case: Case, *, places: bool = False, sentences: bool = False, **weights: float) -> Ranking:
    """`linked` by the embedder's cosines, by the ``places`` they give alone, or with the nearest sentence."""
    cosines = case.cosines
    if sentences:
        cosines = cosines + np.array([(own @ case.question).max() for own in case.sentence_vectors])
    order = by(cosines)
    scores = None if places else [float(cosines[number]) for number in order]
    found = linked(case.asked.question, [case.texts[number] for number in order], scores, **weights)
    return Ranking([order[number] for number in found.order], found.scores)


def linked_order(case: Case, **how: Any) -> list[int]:
    return rank(case, **how).order


METHODS: dict[str, Callable[[Case], list[int]]] = {
    "gold first": lambda case: sorted(
        range(len(case.sizes)), key=lambda number: (number not in case.gold, case.sizes[number])
    ),
    "embedder": lambda case: by(case.cosines),
    "bm25": lambda case: by(case.matches),
    "reciprocal ranks": fused,
    "own scores": partial(linked_order, titles=0.0, names=0.0),
    "linked, titles": partial(linked_order, names=0.0),
    "linked, names": partial(linked_order, titles=0.0),
    **{f"linked, {w:g}": partial(linked_order, titles=w, names=w) for w in (1.0, 3.0)},
    "linked, places": partial(linked_order, places=True),
    "linked": linked_order,
}
WITH_SENTENCES: dict[str, Callable[[Case], list[int]]] = {
    "nearest sentence": partial(nearest_sentence, mixed=False),
    "passage and sentence": partial(nearest_sentence, mixed=True),
    "second hop, sentence": partial(second_hop, whole=False),
    "second hop, passage": partial(second_hop, whole=True),
    "linked, and sentence": partial(linked_order, sentences=True),
}


def rows(name: str, half: str, cases: Sequence[Case], few: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row for each method and share. ``few``: the cases of methods that embed sentences."""
    for methods, own in ((METHODS, cases), (WITH_SENTENCES, few)):
        if not own:
            continue
        nearest = [by(case.cosines) for case in own]
        for method, order_of in methods.items():
            orders, times = [], []
            for case in own:
                _ = (case.cosines, case.sentence_vectors if methods is WITH_SENTENCES else ())
                started = time.process_time()
                orders.append(order_of(case))
                times.append((time.process_time() - started) * 1e3)
            for share in SHARES:
                found = [_fixed(case, order, share) for case, order in zip(own, orders, strict=True)]
                base = [_fixed(case, order, share) for case, order in zip(own, nearest, strict=True)]
                yield {
                    **_row(name, half, method, share, own, found, base),
                    "cpu_ms": round(statistics.median(times), 2),
                }
    yield from adaptive(name, half, cases)


def adaptive(name: str, half: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Rows of budgets that the scores decide, and of a fixed budget of as many tokens."""
    options = PassagesOptions.of({"adaptive": True})
    rankings = [rank(case) for case in cases]
    for enough in ENOUGH:
        found = []
        for case, ranking in zip(cases, rankings, strict=True):
            total = sum(case.sizes)
            least = options.keep_least * total
            order = standing_out(ranking.order, ranking.scores, case.sizes, least, enough)
            found.append(filled(order, case.sizes, options.share * total))
        mean = statistics.fmean(_tokens(case, kept) for case, kept in zip(cases, found, strict=True))
        fixed = _same_tokens(cases, [ranking.order for ranking in rankings], mean)
        row = _row(name, half, f"{ADAPTIVE}, {enough:g}", options.share, cases, found, fixed)
        row["same_tokens"] = row["all_gold"] - row["vs_embedder"][0]
        row["vs_same_tokens"] = row.pop("vs_embedder")
        yield row


def _same_tokens(cases: Sequence[Case], orders: Sequence[list[int]], mean: float) -> list[list[int]]:
    """What a fixed share chooses that takes ``mean`` of the tokens on average."""
    low, high, found = 0.0, 1.0, list[list[int]]()
    for _ in range(24):
        share = (low + high) / 2
        found = [_fixed(case, order, share) for case, order in zip(cases, orders, strict=True)]
        taken = statistics.fmean(_tokens(case, kept) for case, kept in zip(cases, found, strict=True))
        low, high = (share, high) if taken < mean else (low, share)
    return found


def _fixed(case: Case, order: Sequence[int], share: float) -> list[int]:
    return filled(order, case.sizes, share * sum(case.sizes))


def _tokens(case: Case, kept: Sequence[int]) -> float:
    return sum(case.sizes[number] for number in kept) / sum(case.sizes)


def _row(
    name: str,
    half: str,
    method: str,
    share: float,
    cases: Sequence[Case],
    found: Sequence[Sequence[int]],
    base: Sequence[Sequence[int]],
) -> dict[str, Any]:
    hits = [float(case.gold <= set(kept)) for case, kept in zip(cases, found, strict=True)]
    rival = [float(case.gold <= set(kept)) for case, kept in zip(cases, base, strict=True)]
    gains = [a - b for a, b in zip(hits, rival, strict=True)]
    return {
        "set": name,
        "half": half,
        "method": method,
        "share": share,
        "n": len(cases),
        "all_gold": _percent(statistics.fmean(hits)),
        "interval": [_percent(each) for each in interval(hits)],
        "vs_embedder": [_percent(statistics.fmean(gains)), *map(_percent, interval(gains, -1.0, 1.0))],
        "tokens": _percent(statistics.fmean(map(_tokens, cases, found))),
    }


def _percent(share: float) -> float:
    return round(100 * share, 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", type=Path, metavar="DATA")
    parser.add_argument("--work", type=Path, required=True, help="file of vectors (.npz)")
    parser.add_argument("--limit", type=int, help="questions of a half; default: all")
    parser.add_argument("--sentences", type=int, default=40, help="questions of a half; 0: none")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    builder, vectors = PromptBuilder(load_tokenizer(DEFAULT_MODEL)), Vectors(given.work)
    found = []
    for path in given.data:
        for half in ("first", "second"):
            questions = spread(halved(load(path), half), given.limit)
            cases = [
                Case(each, [len(builder.document_ids(d.title, d.text)) for d in each.documents], vectors)
                for each in questions
            ]
            vectors.of([case.asked.question for case in cases], queries=True)
            vectors.of([embedding_text(*each) for case in cases for each in case.texts])
            few = spread(cases, given.sentences)
            vectors.of([text for case in few for own in case.sentences for text in own] or ["-"])
            found += rows(set_name(path), half, cases, few)
            vectors.keep()
    workload = {
        "embedder": "all-MiniLM-L6-v2",
        "tokens": "ragserve-tiny's",
        "questions": "halves of each set",
    }
    report.write("passage-choice", workload, found, out=given.out, note=NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
