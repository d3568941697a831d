"""Weights of the selection signals that are learned on one text, judged on the questions of others.

    python examples/selection_weights.py --data qed10.jsonl.gz --data squad10.jsonl.gz --collection cranfield
        [--out FILE] [--limit 60] [--probes 150]

Needs no model: signal `attention` takes no part. From each text (``examples/corpus``, the passages of
question sets, the documents of collections in BEIR's layout) probes are made as `ragserve calibrate --part
samkv` makes them, and weights are learned. Every row is one choice of weights: the fixed ones, those of a
text, the mean of those of all texts but the one that is asked about. The questions of the sets take part in
nothing but the judgement: percent of questions whose answer stands in what is kept, mean over the shares
kept. Texts without questions are judged by their probes, with weights that have not seen the probe's
document."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.bench import beir
from ragserve.config import DEFAULT_MODEL, load
from ragserve.eval.data import GivenPassage, Question, distinct_passages, set_name
from ragserve.eval.data import load as load_questions
from ragserve.retrieval.embedder import Embedder
from ragserve.verification import report
from ragserve.verification.calibration.signal_weights import (
    LearnedWeights,
    ProbeContext,
    built_in,
    contexts,
    learn,
    options_of,
)
from ragserve.verification.given_scores import GivenScores
from ragserve.verification.metrics import contains_answer
from ragserve.verification.sentence_choice import PromptSentences, SentenceChooser
from sglang_ext.wire.request_options import SamKvOptions

CORPUS = Path(__file__).resolve().parent / "corpus"
OUT = Path(__file__).resolve().parent / "results" / "selection-weights.json"
SHARES = (0.05, 0.1, 0.15, 0.25, 0.4)
DEPTH = 10  # passages of a context


@dataclass(frozen=True)
class JudgedQuestion:
    """A question with the sentences of its prompt."""

    sentences: PromptSentences
    read: Callable[[list[int]], str]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class ProbedText:
    """A text with its questions, none for a collection, and its probes."""

    name: str
    asked: list[JudgedQuestion]
    probes: list[ProbeContext]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, action="append", default=[], help="a question set")
    parser.add_argument("--collection", type=Path, action="append", default=[], help="a folder as BEIR's")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=int, default=60, help="questions, or passages / 10, of each text")
    parser.add_argument("--probes", type=int, default=150, help="probes of each text")
    given = parser.parse_args()
    embedder, tokenizer = Embedder(), load_tokenizer(DEFAULT_MODEL)
    chooser = SentenceChooser(tokenizer)
    maker = TextMaker(PromptBuilder(tokenizer), embedder, chooser, given.limit, given.probes)
    texts = [maker.corpus()]
    texts += [maker.question_set(path) for path in given.data]
    texts += [maker.collection(folder) for folder in given.collection]
    rows = table(texts, chooser)
    report.write(
        "selection-weights",
        {"questions": f"at most {given.limit} a set", "probes": given.probes, "embedder": embedder.name},
        rows,
        out=given.out,
        note="Percent of questions whose answer stands in what is kept, mean over 5, 10, 15, 25 and 40 % "
        "kept; the JSON has each. probes: percent of the probes' sentences kept, mean over 5 to 25 %, by "
        "weights learned on other documents of the text, and by the fixed ones. Attention takes no part.",
    )
    return 0


class TextMaker:
    """Makes texts of at most ``limit`` questions, or ten times as many passages, with ``probes`` probes."""

    def __init__(
        self, builder: PromptBuilder, embedder: Embedder, chooser: SentenceChooser, limit: int, probes: int
    ) -> None:
        self._builder, self._embedder, self._chooser = builder, embedder, chooser
        self._limit, self._count = limit, probes
        self._bytes = load().sentence_bytes

    def question_set(self, path: Path) -> ProbedText:
        """A set whose questions bring their passages; probes are made of the passages of all of them."""
        questions = [q for q in load_questions(path, self._limit) if answerable(q)]
        passages = distinct_passages(questions)
        given = self._scores(passages)
        number = {passage: n for n, passage in enumerate(passages)}
        asked = [
            self._asked(q.question, q.answers, [number[d] for d in q.documents], passages, given)
            for q in questions
        ]
        return ProbedText(set_name(path), asked, self._probes(passages, given))

    def corpus(self) -> ProbedText:
        """The example corpus: its questions are asked over the passages that are nearest to them."""
        passages = corpus_passages()
        given = self._scores(passages)
        lines = (CORPUS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines][:: max(1, len(lines) // self._limit)][: self._limit]
        asked = []
        for row in rows:
            shown = given.nearest(row["question"], DEPTH)
            if any(contains_answer(passages[n].text, row["answers"]) for n in shown):
                asked.append(self._asked(row["question"], tuple(row["answers"]), shown, passages, given))
        return ProbedText("corpus", asked, self._probes(passages, given))

    def collection(self, folder: Path) -> ProbedText:
        """The first documents of a collection; its queries have no answers."""
        documents = beir.load(folder).documents.values()
        passages = [GivenPassage(*document) for document in islice(documents, 10 * self._limit)]
        return ProbedText(folder.name, [], self._probes(passages, self._scores(passages)))

    def _scores(self, passages: Sequence[GivenPassage]) -> GivenScores:
        return GivenScores(self._builder, self._embedder, passages, self._bytes)

    def _probes(self, passages: Sequence[GivenPassage], given: GivenScores) -> list[ProbeContext]:
        return contexts(passages, self._builder, self._embedder, given, count=self._count, depth=DEPTH)

    def _asked(
        self,
        question: str,
        answers: tuple[str, ...],
        shown: Sequence[int],
        passages: Sequence[GivenPassage],
        given: GivenScores,
    ) -> JudgedQuestion:
        documents = [PromptDocument("", passages[n].title, passages[n].text) for n in shown]
        prompt = self._builder.build(question, documents, max_prompt_tokens=10**6)
        sentences = self._chooser.sentences(prompt, given.of(question, prompt, shown))
        return JudgedQuestion(sentences, self._chooser.read, answers)


def answerable(question: Question) -> bool:
    return any(contains_answer(document.text, question.answers) for document in question.documents)


def corpus_passages() -> list[GivenPassage]:
    """The chunks of the example corpus, cut as `ragserve ingest` cuts them."""
    from ragserve.ingest.chunking import Chunker
    from ragserve.ingest.parsers import Raw, parse
    from ragserve.ingest.tokenizer import Counter, TokenizerSource

    chunker = Chunker(Counter(TokenizerSource.load(DEFAULT_MODEL)), load().chunk_tokens)
    found = []
    for path in sorted((CORPUS / "files").iterdir()):
        parsed = parse(Raw(path.read_bytes(), path.name, path.suffix))
        chunks = chunker.split(parsed.text, parsed.pages)
        found += [GivenPassage(parsed.title or path.stem, chunk.text) for chunk in chunks]
    return found


def table(texts: Sequence[ProbedText], chooser: SentenceChooser) -> list[dict[str, Any]]:
    """A row for each choice of weights."""
    learned = {text.name: learn(chooser, text.probes) for text in texts}
    weights = {name: found.figures["weights"] for name, found in learned.items()}
    rows = [_row("fixed", [built_in(attention=False)] * len(texts), texts)]
    for name, found in learned.items():
        rows.append(_row(name, [weights[name]] * len(texts), texts) | weights[name] | _probed(found))
    others = [_mean([own for name, own in weights.items() if name != text.name]) for text in texts]
    return [*rows, _row("mean of the others", others, texts)]


def _mean(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(own[name] for own in every) for name in every[0]}


def _row(name: str, weights: Sequence[Mapping[str, float]], texts: Sequence[ProbedText]) -> dict[str, Any]:
    """``weights``: those for each of the texts."""
    row: dict[str, Any] = {"weights": name}
    by_share = {}
    for own, text in zip(weights, texts, strict=True):
        if text.asked:
            by_share[text.name] = found = answers_kept(text.asked, own)
            row[text.name] = round(statistics.fmean(found), 1)
    return row | {"by share": by_share}


def answers_kept(asked: Sequence[JudgedQuestion], weights: Mapping[str, float]) -> list[float]:
    """Percent of questions whose answer stands in what is kept, at each of `SHARES`."""
    options = SamKvOptions.model_validate({"experimental": options_of(weights)})
    kept = [
        [
            any(contains_answer(question.read(run), question.answers) for run in runs)
            for runs in question.sentences.runs(options, SHARES)
        ]
        for question in asked
    ]
    return [round(100 * statistics.fmean(found), 1) for found in zip(*kept, strict=True)]


def _probed(found: LearnedWeights) -> dict[str, Any]:
    held = {f"probes {name}": round(100 * share, 1) for name, share in found.figures["held out"].items()}
    return held | {"better": found.figures["used"]}


if __name__ == "__main__":
    sys.exit(main())
