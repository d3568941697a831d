"""How well answers are attributed to the passages that support them.

    python -m benchmarks.answer_support SETS_FOLDER ANSWERS.json ... [--out FILE]

ANSWERS.json are results of `benchmarks.document_prefixes` (variant ``full``: the model read all passages of
its question, 24 tokens, greedily). Passages are marked gold in the sets. Of right answers (those that contain
an accepted answer) the gold passages should be cited, and no others: ``precision`` and ``recall``, over all
citations, with 95 % intervals of a bootstrap over questions; ``holding``: the recall of gold passages that
contain an accepted answer. ``before``: all passages, or those that contain the answer word for word. ``made
up``: the share of answers that are cited though they are those of another question. The weights were chosen
on the first half of each set."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.places import RESULTS
from ragserve.answering.support import attribute
from ragserve.eval.data import Question, find, load
from ragserve.verification.metrics import contains_answer
from ragserve.verification.report import write

OUT = RESULTS / "answer-support.json"
NOTE = (
    "Real answers over all passages of their question (10, musique 20), given back to passages marked gold. "
    "Right answers only, but for 'made up' and 'wrong answers cited'. 95 % intervals by 2,000 bootstrap "
    "samples of questions."
)
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
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    answered = read(options.sets, options.answers)
    names = sorted({name for name, _ in answered})
    rows = [
        row(name, half, model, [each for set_, each in answered if set_ == name])
        for name in names
        for half in ("first", "second")
        for model in sorted({each.model for set_, each in answered if set_ == name})
    ]
    started = time.perf_counter()
    for _, each in answered:
        cited(each.answer, each.question)
    workload = {
        "sets": names,
        "answers": len(answered),
        "ms_an_answer": round((time.perf_counter() - started) * 1e3 / len(answered), 1),
    }
    write("answer-support", workload, [each for each in rows if each["right"]], out=options.out, note=NOTE)
    return 0


def read(sets: Path, files: Sequence[Path]) -> list[tuple[str, Answered]]:
    """The answers of all files, each of a question and model once, by set."""
    questions: dict[str, list[Question]] = {}
    found: dict[tuple[str, str, int], Answered] = {}
    for path in files:
        report = json.loads(path.read_text(encoding="utf-8"))
        for each in report["rows"]:
            if each["variant"] != "full":
                continue
            own = questions.setdefault(each["set"], load(find(each["set"], sets)))
            number = each["question"]
            half = "first" if number < (len(own) + 1) // 2 else "second"
            found[each["set"], report["model"], number] = Answered(
                report["model"], half, own[number], each["answer"], bool(each["contains"])
            )
    return [(key[0], answered) for key, answered in sorted(found.items(), key=lambda pair: pair[0])]


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
