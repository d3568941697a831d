"""How well answers are attributed to the passages that support them.

    python -m benchmarks.answer_support SETS_FOLDER [ANSWERS ...] [--out FILE] [--fit]

Passages are marked gold in the sets (squad10, qed10, musique, 2wikimqa). The gold passages of a right answer
should be cited, and no others: ``precision`` and ``recall``, over all citations, with 95 % intervals of a
bootstrap over questions; ``holding``: the recall of gold passages that contain an accepted answer.
``before``: all passages, or those that contain the answer word for word. ``made up``: the share of answers
that are cited though they are those of another question.

Rows of ``gold answer`` take each question's first accepted answer for the answer: all questions are judged,
whatever a model finds. ANSWERS are what models said to all passages of a question: results of
`benchmarks.document_prefixes` (``.json``, variant ``full``), or rows of an evaluation (``.jsonl``, strategy
``full``; ``MODEL.jsonl`` names the model). Of these the right ones count, which contain an accepted answer.

The weights were fitted on the gold answers of the first half of each set: ``--fit`` does it again and prints
them (needs scikit-learn)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.places import RESULTS
from ragserve.answering.passage_links import LinkSignals
from ragserve.answering.support import LEAST_SUM, WEIGHTS, AnswerWords, attribute
from ragserve.eval.data import Question, find, load
from ragserve.verification.metrics import contains_answer
from ragserve.verification.report import write

OUT = RESULTS / "answer-support.json"
NOTE = (
    "Answers over all passages of their question (10, musique 20), given back to passages marked gold. 'gold "
    "answer': the accepted one, to all questions; else models' answers, right ones only but for 'made up' "
    "and 'wrong answers cited'. '2 gold': questions with two gold passages. 95 % intervals by 2,000 "
    "bootstrap samples of questions. Weights were fitted on the gold answers of the first halves."
)
GOLD = "gold answer"
SETS = ("squad10", "qed10", "musique", "2wikimqa")
TRIES = {
    "first alone": (LinkSignals(0, 0, 0, 0, 0), 1.0),
    "coverage": (LinkSignals(added=5.8, asked=0, titled=0, named=0, score=1.7), 3.0),
    "links": (LinkSignals(added=0, asked=4.4, titled=2.7, named=2.7, score=1.1), 4.2),
    "both": (WEIGHTS, LEAST_SUM),
}
"""Weights and least sum of the passages beside the first: those of the product, and two that it was compared
with. Of the sums in steps of 0.2, the lowest that keeps 85 % precision on the first half of each set."""
_SEVERAL = ("musique", "2wikimqa")  # whose questions have two to four gold passages
_SAMPLES, _SHIFT = 2000, 7
Cite = Callable[[str, Question], set[int]]


@dataclass(frozen=True, slots=True)
class Answered:
    """A model's answer to a question of a half."""

    model: str
    half: str
    question: Question
    answer: str
    right: bool

    @property
    def gold(self) -> set[int]:
        return {n for n, document in enumerate(self.question.documents, 1) if document in self.question.gold}

    @property
    def holding(self) -> set[int]:
        texts = {n: document.text for n, document in enumerate(self.question.documents, 1)}
        return {n for n in self.gold if contains_answer(texts[n], self.question.answers)}


def cited(answer: str, question: Question) -> set[int]:
    """The numbers of the passages that the product cites."""
    passages = [(document.title, document.text) for document in question.documents]
    found = attribute(answer, (), question.question, passages)
    return {number for sentence in found for number in sentence.passages}


def cited_before(answer: str, question: Question) -> set[int]:
    """What was cited before: passages that contain the answer word for word, else all."""
    wanted = answer.strip(" .,;:!?\"'()[]")
    texts = [document.text for document in question.documents]
    quoting = {n for n, text in enumerate(texts, 1) if wanted and contains_answer(text, [wanted])}
    return quoting or set(range(1, len(texts) + 1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", type=Path)
    parser.add_argument("answers", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    gold = accepted(options.sets)
    if options.fit:
        fit([(name, each) for name, each in gold if each.half == "first"])
        return 0
    answered = gold + read(options.sets, options.answers)
    rows = []
    for name in SETS:
        own = [each for set_, each in answered if set_ == name]
        kinds = {name: own}
        if name in _SEVERAL:
            kinds[f"{name}, 2 gold"] = [each for each in own if len(each.gold) == 2]
        rows += [
            row(kind, half, model, of)
            for kind, of in kinds.items()
            for half in ("first", "second")
            for model in sorted({each.model for each in of}, key=lambda model: (model != GOLD, model))
        ]
    started = time.process_time()
    for _, each in gold:
        cited(each.answer, each.question)
    workload = {
        "sets": list(SETS),
        "answers": len(answered),
        "cpu_ms_an_answer": round((time.process_time() - started) * 1e3 / len(gold), 1),
    }
    write("answer-support", workload, [each for each in rows if each["right"]], out=options.out, note=NOTE)
    tries = options.out.with_name(f"{options.out.stem}-tries.json")
    write("answer-support-tries", {"answers": "gold, second halves"}, tried(gold), out=tries)
    return 0


def tried(gold: Sequence[tuple[str, Answered]]) -> list[dict[str, Any]]:
    """The rows of `TRIES` on the second halves."""
    found = []
    for by, rule in TRIES.items():
        for name in SETS:
            own = [each for set_, each in gold if (set_, each.half) == (name, "second")]

            def cite(answer: str, question: Question, rule: tuple[LinkSignals, float] = rule) -> set[int]:
                passages = [(document.title, document.text) for document in question.documents]
                numbers, _ = AnswerWords(question.question, passages, *rule).supporting(answer)
                return {number + 1 for number in numbers}

            head = {"set": name, "passages beside the first by": by, "questions": len(own)}
            found.append(head | figures(own, cite))
    return found


def accepted(sets: Path) -> list[tuple[str, Answered]]:
    """Each question's first accepted answer, by set."""
    found = []
    for name in SETS:
        questions = load(find(name, sets))
        for number, question in enumerate(questions):
            found.append(
                (name, Answered(GOLD, _half(number, questions), question, question.answers[0], True))
            )
    return [(name, each) for name, each in found if each.gold]


def read(sets: Path, files: Sequence[Path]) -> list[tuple[str, Answered]]:
    """The models' answers of all files, each of a question and model once, by set."""
    questions = {name: load(find(name, sets)) for name in SETS}
    places = {name: {each.id: n for n, each in enumerate(own)} for name, own in questions.items()}
    found: dict[tuple[str, str, int], Answered] = {}
    for path in files:
        for model, each in _rows(path):
            name = each["set"]
            number = each["question"] if "question" in each else places[name][each["id"]]
            question = questions[name][number]
            found[name, model, number] = Answered(
                model, _half(number, questions[name]), question, each["answer"], bool(each["contains"])
            )
    return [(key[0], answered) for key, answered in sorted(found.items(), key=lambda pair: pair[0])]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The answers over all passages in a file, with their model."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        for each in map(json.loads, text.splitlines()):
            if each["set"] in SETS and each["strategy"] == "full" and not each.get("error"):
                yield path.stem, each
        return
    report = json.loads(text)
    for each in report["rows"]:
        if each["variant"] == "full":
            yield report["model"], each


def _half(number: int, questions: Sequence[Question]) -> str:
    return "first" if number < (len(questions) + 1) // 2 else "second"


def fit(answered: Sequence[tuple[str, Answered]]) -> None:
    """Print the weights that tell passages to cite beside others from the rest, and the sum where that is as
    likely as not, for each of `TRIES`: every set counts the same."""
    from sklearn.linear_model import LogisticRegression

    sizes = Counter(name for name, _ in answered)
    drawn: list[tuple[LinkSignals, bool, float]] = []
    for name, each in answered:
        passages = [(document.title, document.text) for document in each.question.documents]
        words = AnswerWords(each.question.question, passages)
        cited, scores = words.first(each.answer)
        while cited:
            signals = words.signals(cited, each.answer, scores)
            drawn += [(of, number + 1 in each.gold, 1 / sizes[name]) for number, of in signals.items()]
            left = [number for number in signals if number + 1 in each.gold]
            if not left:
                break
            cited = cited | {max(left, key=lambda number: signals[number].added)}
    x, y, weight = (np.array(column) for column in zip(*drawn, strict=True))
    for name, (weights, _) in TRIES.items():
        own = x * np.array([each != 0 for each in weights])
        model = LogisticRegression(max_iter=2000).fit(own, y, sample_weight=weight / weight.mean())
        print(name, LinkSignals(*(round(float(each), 2) for each in model.coef_[0])), -model.intercept_[0])


def row(name: str, half: str, model: str, answered: Sequence[Answered]) -> dict[str, Any]:
    """The report's row of a set's half and a model."""
    own = [each for each in answered if (each.half, each.model) == (half, model)]
    right = [each for each in own if each.right]
    others = [
        (each.question, other.answer)
        for each, other in zip(own, [*own[_SHIFT:], *own[:_SHIFT]], strict=True)
        if not contains_answer(other.answer, each.question.answers)
    ]
    return {
        "set": name,
        "half": half,
        "model": model,
        "answers": len(own),
        "right": len(right),
        **figures(right, cited),
        **{f"{key} before": value for key, value in figures(right, cited_before).items() if "%" not in key},
        "wrong answers cited": share([bool(cited(e.answer, e.question)) for e in own if not e.right]),
        "made up": share([bool(cited(answer, question)) for question, answer in others]),
    }


def figures(right: Sequence[Answered], cite: Cite) -> dict[str, Any]:
    """Precision and recall in percent, with intervals."""
    chosen = [cite(each.answer, each.question) for each in right]
    hits = np.array([len(c & e.gold) for c, e in zip(chosen, right, strict=True)])
    sizes, golds = np.array([len(c) for c in chosen]), np.array([len(each.gold) for each in right])
    holding = [len(c & e.holding) for c, e in zip(chosen, right, strict=True)]
    held = sum(len(each.holding) for each in right)
    drawn = np.random.default_rng(0).integers(0, max(1, len(right)), (_SAMPLES, len(right)))
    return {
        "precision": _percent(hits.sum(), sizes.sum()),
        "precision 95 %": _interval(hits, sizes, drawn),
        "recall": _percent(hits.sum(), golds.sum()),
        "recall 95 %": _interval(hits, golds, drawn),
        "holding": _percent(sum(holding), held),
    }


def share(values: Sequence[bool]) -> float | None:
    """The share of true ones, percent; None of none."""
    return _percent(sum(values), len(values))


def _percent(part: float, whole: float) -> float | None:
    return round(100 * float(part) / float(whole), 1) if whole else None


def _interval(hits: np.ndarray, of: np.ndarray, drawn: np.ndarray) -> list[float] | None:
    if not len(hits):
        return None
    ratios = hits[drawn].sum(1) / np.maximum(1, of[drawn].sum(1))
    return [round(100 * float(each), 1) for each in np.quantile(ratios, [0.025, 0.975])]


if __name__ == "__main__":
    sys.exit(main())
