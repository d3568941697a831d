"""Question sets whose passages stand among many others of real text.

    python -m benchmarks.long_contexts OUT_DIR SET ... --articles FILE ... [--others 60,250]
        [--embedder NAME|FOLDER|bm25] [--limit N] [--seed 0]

Writes OUT_DIR/SET_60.jsonl and so on, in the form of the sets with marked passages ({id, question, answers,
ctxs: [{title, text, gold}]}), for `ragserve eval`. Articles ({title, text} a line, plain, .gz or .xz) are cut
into passages of about 65 words, at ends of sentences. Half of a question's other passages are the nearest
ones to it, by the embedder (the product's default, another one's name or folder, or BM25), half are drawn at
random; none contains an accepted answer. All passages then stand in a random order. The same arguments make
the same sets, and the others of a smaller number are among those of a larger one. With sets of ten passages,
60 others make about 8,000 tokens and 250 about 30,000."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ragserve.errors import InvalidRequest
from ragserve.eval.data import GivenPassage, Question, load, set_name
from ragserve.ingest.chunk_embedding import embedding_text
from ragserve.json_lines import json_lines
from ragserve.verification.metrics import contains_answer

BM25 = "bm25"
WORDS = 56  # of a passage; the last one of an article may have half
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_SPARE = 200  # nearest passages that may be left out for holding an answer


def passages_of(title: str, text: str, words: int = WORDS) -> Iterator[GivenPassage]:
    """Cut an article into passages of at least ``words`` words, at ends of sentences and lines. A rest of
    fewer than half is left out."""
    sentences: list[str] = []
    count = 0
    for sentence in chain(_SENTENCE_END.split(text), [None]):
        if sentence:
            sentences.append(sentence)
            count += len(sentence.split())
        if count >= words or (sentence is None and count >= words / 2):
            yield GivenPassage(title, " ".join(sentences))
            sentences, count = [], 0


class Nearest:
    """Ranks a pool of passages for questions: by an embedder, or by BM25."""

    def __init__(self, pool: Sequence[GivenPassage], embedder: str | None) -> None:
        """``embedder``: `bm25`, or a model's name or folder; None: the product's default."""
        texts = [embedding_text(each.title, each.text) for each in pool]
        self._embedder: Any = None
        if embedder == BM25:
            import bm25s

            self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
            self._index.index(_words(texts), show_progress=False)
        else:
            from ragserve.retrieval.embedder import Embedder

            self._embedder = Embedder() if embedder is None else Embedder(embedder)
            self._vectors = self._embedder.encode(texts)
        self._size = len(pool)

    def of(self, questions: Sequence[str], depth: int) -> list[list[int]]:
        """The numbers of the ``depth`` nearest passages of each question, the nearest first."""
        depth = min(depth, self._size)
        if self._embedder is None:
            found, _ = self._index.retrieve(_words(questions), k=depth, show_progress=False)
            return [[int(number) for number in each] for each in found]
        asked = self._embedder.encode_queries(list(questions))
        orders = (np.argsort(-(self._vectors @ vector), kind="stable")[:depth] for vector in asked)
        return [order.tolist() for order in orders]


def others_of(
    question: Question, nearest: Sequence[int], pool: Sequence[GivenPassage], count: int, draw: random.Random
) -> list[GivenPassage]:
    """Passages of ``pool`` for a question, ``count`` or, where the pool ends, fewer: every other one the
    next of ``nearest``, the rest at random. None holds an answer, or is one of the question's own."""
    own = {(each.title, each.text) for each in question.documents}

    def fitting(numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            each = pool[number]
            holds = contains_answer(embedding_text(each.title, each.text), question.answers)
            if not holds and (each.title, each.text) not in own:
                yield number

    near, far = fitting(nearest), fitting(draw.sample(range(len(pool)), len(pool)))
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        source = (near, far)[len(chosen) % 2]
        number = next((each for each in source if each not in chosen), None)
        if number is None:
            number = next((each for each in chain(near, far) if each not in chosen), None)
        if number is None:
            break
        chosen[number] = None
    return [pool[number] for number in chosen]


def row_of(question: Question, others: Sequence[GivenPassage], draw: random.Random) -> dict[str, Any]:
    """A line of the new set: the question's passages and the others in a random order."""
    every = [*question.documents, *others]
    draw.shuffle(every)
    gold = set(question.gold)
    ctxs = [{"title": each.title, "text": each.text, "gold": each in gold} for each in every]
    kind = {"kind": question.kind} if question.kind else {}
    answers = list(question.answers)
    return {"id": question.id, "question": question.question, "answers": answers, "ctxs": ctxs, **kind}


def _words(texts: Sequence[str]) -> Any:
    import bm25s

    return bm25s.tokenize(list(texts), stopwords="en", show_progress=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", type=Path, nargs="+")
    parser.add_argument("--articles", type=Path, nargs="+", required=True)
    parser.add_argument("--others", default="60,250", help="passages added, a set for each number")
    parser.add_argument("--embedder", help=f"name or folder of a model, or {BM25}")
    parser.add_argument("--limit", type=int, help="questions of each set")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    counts = [int(count) for count in given.others.split(",")]
    rows = (row for path in given.articles for _, row in json_lines(path))
    pool = [each for row in rows for each in passages_of(str(row["title"]), str(row["text"]))]
    if len(pool) < max(counts):
        raise InvalidRequest(f"The articles have {len(pool)} passages, fewer than {max(counts)}.")
    ranks = Nearest(pool, given.embedder)
    given.out.mkdir(parents=True, exist_ok=True)
    for path in given.sets:
        questions = load(path, given.limit)
        nearest = ranks.of([each.question for each in questions], max(counts) // 2 + _SPARE)
        for count in counts:
            lines, words = [], 0
            for question, near in zip(questions, nearest, strict=True):
                draw = random.Random(f"{given.seed} {set_name(path)} {question.id}")
                row = row_of(question, others_of(question, near, pool, count, draw), draw)
                words += sum(len(each["text"].split()) for each in row["ctxs"])
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            place = given.out / f"{set_name(path)}_{count}.jsonl"
            place.write_text("".join(lines), encoding="utf-8")
            print(f"{place}: {len(lines)} questions, {words // len(lines):,} words each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
