"""How often `samkv` takes a passage for the continuation of the one before it (``continuation_weight``), and
what that does to what is kept, over chunks as the product cuts and retrieves them.

    python examples/continued_passages.py --data qed10.jsonl.gz --data squad10.jsonl.gz
        --articles squad2.json.gz --collection cranfield [--out FILE] [--limit 40]

Needs no model: signal `attention` takes no part. Texts are ``examples/corpus``; the passages of question
sets, each a document of its own; articles in SQuAD's layout, paragraphs joined; and documents of a collection
in BEIR's layout, whose queries have no answers. All are cut by the product's chunker, and a question's
context is the chunks that are nearest to it, nearest first, as `/rag/query` shows them."""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.bench import beir
from ragserve.config import DEFAULT_MODEL, load
from ragserve.eval.data import GivenPassage, distinct_passages, set_name
from ragserve.eval.data import load as load_questions
from ragserve.ingest.chunking import Chunker
from ragserve.ingest.parsers import Raw, parse
from ragserve.ingest.tokenizer import Counter, TokenizerSource
from ragserve.retrieval.embedder import Embedder
from ragserve.verification import report
from ragserve.verification.given_scores import GivenScores
from ragserve.verification.metrics import contains_answer
from ragserve.verification.sentence_choice import PromptSentences, SentenceChooser
from sglang_ext.context.selection.signals.terms import DocumentTerms
from sglang_ext.wire.request_options import SamKvOptions

CORPUS = Path(__file__).resolve().parent / "corpus"
OUT = Path(__file__).resolve().parent / "results" / "continued-passages.json"
SHARES = (0.1, 0.15, 0.25, 0.4)
COMPARED = 0.25  # the share at which what is kept is compared
WEIGHTS = (0.0, 0.7)
DEPTHS = (5, 10)  # passages of a context
NOTE = (
    "continued: percent of the passages behind a context's first that name no subject of their own; "
    "with one: of contexts. answer in one: percent of questions whose answer stands in no other passage. "
    f"other tokens: percent of those kept at {COMPARED:.0%} that are not kept without the rule. 10% to "
    "40%: percent of questions whose answer stands in what is kept. Attention takes no part."
)


@dataclass(frozen=True)
class Text:
    """A text: its chunks, and questions with answers, none of a collection."""

    name: str
    chunks: list[GivenPassage]
    questions: list[tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Asked:
    """A question with the sentences of its prompt, the passages there that name no subject of their own (the
    first aside), and the places of the passages that have the answer."""

    sentences: PromptSentences
    answers: tuple[str, ...]
    continued: list[int]
    answering: list[int]


class Cutter:
    """Cuts documents as `ragserve ingest` does."""

    def __init__(self) -> None:
        self._chunker = Chunker(Counter(TokenizerSource.load(DEFAULT_MODEL)), load().chunk_tokens)

    def chunks(self, title: str, text: str, pages: Sequence[tuple[int, int]] = ()) -> list[GivenPassage]:
        return [GivenPassage(title, chunk.text) for chunk in self._chunker.split(text, pages)]

    def corpus(self) -> Text:
        found = []
        for path in sorted((CORPUS / "files").iterdir()):
            parsed = parse(Raw(path.read_bytes(), path.name, path.suffix))
            found += self.chunks(parsed.title or path.stem, parsed.text, parsed.pages)
        rows = map(json.loads, (CORPUS / "questions.jsonl").read_text(encoding="utf-8").splitlines())
        return Text("corpus", found, [(row["question"], tuple(row["answers"])) for row in rows])

    def question_set(self, path: Path, limit: int) -> Text:
        questions = load_questions(path, limit)
        chunks = [c for p in distinct_passages(questions) for c in self.chunks(p.title, p.text)]
        return Text(set_name(path), chunks, [(q.question, q.answers) for q in questions])

    def articles(self, path: Path) -> Text:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            articles = json.load(file)["data"]
        chunks, questions = [], []
        for article in articles:
            paragraphs = article["paragraphs"]
            text = "\n\n".join(paragraph["context"] for paragraph in paragraphs)
            chunks += self.chunks(article["title"].replace("_", " "), text)
            questions += [
                (qa["question"], tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])))
                for paragraph in paragraphs
                for qa in paragraph["qas"]
                if qa["answers"]
            ]
        return Text("squad articles", chunks, questions)

    def collection(self, folder: Path, limit: int) -> Text:
        found = beir.load(folder)
        chunks = [c for title, text in found.documents.values() for c in self.chunks(title, text)]
        queries = islice(found.queries.values(), limit)
        return Text(folder.name, chunks, [(query, ()) for query in queries])


def evenly(items: Sequence[Any], limit: int) -> list[Any]:
    return list(items[:: max(1, len(items) // limit)][:limit])


def rows_of(
    text: Text, limit: int, builder: PromptBuilder, embedder: Embedder, chooser: SentenceChooser
) -> Iterable[dict[str, Any]]:
    """A row for each number of passages and each weight."""
    given = GivenScores(builder, embedder, text.chunks, load().sentence_bytes)
    for depth in DEPTHS:
        asked = []
        for question, answers in evenly(text.questions, limit):
            shown = given.nearest(question, depth)
            passages = [text.chunks[n] for n in shown]
            answering = [n for n, each in enumerate(passages) if contains_answer(each.text, answers)]
            if answers and not answering:
                continue
            documents = [PromptDocument("", each.title, each.text) for each in passages]
            prompt = builder.build(question, documents, max_prompt_tokens=10**6)
            sentences = chooser.sentences(prompt, given.of(question, prompt, shown))
            continued = []
            for number, (span, bounds) in enumerate(zip(prompt.spans[1:], sentences.bounds(), strict=True)):
                ids = prompt.input_ids[span.start : span.end]
                terms = DocumentTerms.of([chooser.read(ids[a:b]) for a, b in bounds])
                if number and not terms.names_itself:
                    continued.append(number)
            asked.append(Asked(sentences, answers, continued, answering))
        chooser.forget()
        yield from (row(text.name, depth, weight, asked, chooser) for weight in WEIGHTS)


def row(
    name: str, depth: int, weight: float, asked: Sequence[Asked], chooser: SentenceChooser
) -> dict[str, Any]:
    options = options_of(weight)
    with_answers = [each for each in asked if each.answers]
    kept = [
        [
            any(contains_answer(chooser.read(run), each.answers) for run in runs)
            for runs in each.sentences.runs(options, SHARES)
        ]
        for each in with_answers
    ]
    found = {
        f"{share:.0%}": round(100 * statistics.fmean(own), 1)
        for share, own in zip(SHARES, zip(*kept, strict=True), strict=bool(kept))
    }
    return {
        "text": name,
        "passages": depth,
        "questions": len(asked),
        "continuation_weight": weight,
        "continued": percent(len(each.continued) / (depth - 1) for each in asked),
        "with one": percent(bool(each.continued) for each in asked),
        "answer in one": percent(set(each.answering) <= set(each.continued) for each in with_answers),
        "other tokens": percent(changed(each.sentences, options) for each in asked),
        **found,
    }


def options_of(weight: float) -> SamKvOptions:
    """The defaults without attention."""
    return SamKvOptions.model_validate(
        {"experimental": {"lexical_weight": 1.0, "continuation_weight": weight}}
    )


def changed(sentences: PromptSentences, options: SamKvOptions) -> float:
    """Which share of the tokens that are kept would not be without the rule."""
    (own,), (plain,) = (sentences.positions(each, (COMPARED,)) for each in (options, options_of(0.0)))
    return len(set(own) - set(plain)) / len(own)


def percent(shares: Iterable[float]) -> float | None:
    found = list(shares)
    return round(100 * statistics.fmean(found), 1) if found else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, action="append", default=[], help="a question set")
    parser.add_argument("--articles", type=Path, action="append", default=[], help="articles, .json.gz")
    parser.add_argument("--collection", type=Path, action="append", default=[], help="a folder as BEIR's")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=int, default=40, help="questions of each text")
    given = parser.parse_args()
    embedder, tokenizer = Embedder(), load_tokenizer(DEFAULT_MODEL)
    builder, chooser, cutter = PromptBuilder(tokenizer), SentenceChooser(tokenizer), Cutter()
    found = report.GrowingReport("continued-passages", given.out, note=NOTE)
    found.workload = {
        "questions": f"at most {given.limit} a text",
        "embedder": embedder.name,
        "chunk tokens": load().chunk_tokens,
    }

    def measure(text: Text) -> None:
        for each in rows_of(text, given.limit, builder, embedder, chooser):
            found.add(each)

    measure(cutter.corpus())
    for path in given.data:
        measure(cutter.question_set(path, given.limit))
    for path in given.articles:
        measure(cutter.articles(path))
    for path in given.collection:
        measure(cutter.collection(path, given.limit))
    found.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
