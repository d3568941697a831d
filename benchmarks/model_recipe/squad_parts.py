"""Put SQuAD's training set together from parts: passages in some files, questions and answers in others.

Three files have passages with questions. A fourth has 81,403 questions with the answer and its place in a
passage that is not at hand. A question belongs to a known passage that has the answer at this place and the
question's words; of the questions whose passage is known, 1 to 2 % got a wrong one. Articles of Wikipedia
give further passages. The last file has sentences that answer a question."""

from __future__ import annotations

import heapq
import json
import math
import re
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.model_recipe.sources import Reading, detokenised

_TOKEN = re.compile(r"\d+(?:[.,:]\d+)+|[^\W_]+(?:[-./][^\W_]+)*|\S")
CANDIDATES = 25
RAREST = 6  # words that name the candidates
SHARE = 0.3  # of the question's words, weighted by how rare they are
COMMON = 0.15  # of the passages: a word in more says nothing


def key(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text.lower())


def tokens(text: str) -> list[str]:
    """Lower-case tokens, close to those the places count."""
    return [each.lower() for each in _TOKEN.findall(text.replace("``", '"').replace("''", '"'))]


def whole(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Passages with a question and its answer."""
    for article in json.loads((folder / "aq-test.json").read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                yield paragraph["context"], qa["question"], qa["answers"][0]["text"]
    for row in json.loads((folder / "router-dev.json").read_text(encoding="utf-8")):
        yield row["context"], row["question"], row["answer"]
    for part in ("train", "valid", "test"):
        for row in json.loads((folder / f"flan-{part}.json").read_text(encoding="utf-8")):
            for qa in row["qas"]:
                yield row["context"], qa["question"], qa["answer"]


def questions(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Questions, answers and the answers' first tokens, without their passages; text is in tokens."""
    vocabulary = (folder / "vocab.dat").read_text(encoding="utf-8").split("\n")
    names = ("train.ids.question", "train.answer", "train.span")
    lines = [(folder / name).read_text(encoding="utf-8").split("\n") for name in names]
    for ids, answer, span in zip(*lines, strict=False):
        if ids and answer and span:
            yield " ".join(vocabulary[int(i)] for i in ids.split()), answer, int(span.split()[0])


class Passages:
    """Passages by word."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = list(texts)
        self.tokens = [tokens(text) for text in self.texts]
        self.having: dict[str, list[int]] = defaultdict(list)
        for i, found in enumerate(self.tokens):
            for word in set(found):
                self.having[word].append(i)

        self.weights = {word: math.log(len(self.texts) / len(at)) for word, at in self.having.items()}
        self.unknown = math.log(len(self.texts))

    def find(self, question: str, answer: str, place: int) -> int | None:
        """Return the passage with the answer at about this place and most of the question's words."""
        wanted = tokens(answer)
        asked = {w: self.weights.get(w, self.unknown) for w in set(tokens(question))}
        asked = {word: weight for word, weight in asked.items() if weight > -math.log(COMMON)}
        known = {word for word in (*asked, *wanted) if word in self.having}
        scores: dict[int, float] = defaultdict(float)
        for word in sorted(known, key=self.weights.__getitem__)[-RAREST:]:
            for i in self.having[word]:
                scores[i] += self.weights[word]
        near = range(max(0, place - 4 - place // 25), place + 5 + place // 25)
        best, found = SHARE * sum(asked.values()), None
        for i in heapq.nlargest(CANDIDATES, scores, key=scores.__getitem__):
            text = self.tokens[i]
            if any(text[at : at + len(wanted)] == wanted for at in near):
                share = sum(asked[word] for word in asked.keys() & set(text))
                if share > best:
                    best, found = share, i
        return found


def as_written(answer: str, text: str) -> str:
    """Return the answer's characters in the text, or nothing."""
    found = re.search(r"\s*".join(map(re.escape, tokens(answer))), text, re.IGNORECASE)
    return found.group() if found else ""


def readings(folder: Path, articles: Iterable[tuple[str, str]]) -> Iterator[Reading]:
    """Passages and sentences with questions; ``articles`` may have further passages."""
    titles = {
        urllib.parse.unquote(line).replace("_", " ")
        for line in (folder / "doclist-train.txt").read_text(encoding="utf-8").split()
    }
    qas: dict[str, dict[str, str]] = defaultdict(dict)
    texts: dict[str, str] = {}
    seen = set()
    for text, question, answer in whole(folder):
        beginning = key(text)[:150]
        texts.setdefault(beginning, text)
        if key(question) not in seen:
            seen.add(key(question))
            qas[texts[beginning]][question.strip()] = as_written(answer, texts[beginning])
    for line in (folder / "val.context").read_text(encoding="utf-8").splitlines():
        texts.setdefault(key(line)[:150], detokenised(line.split()))
    paragraphs = (p for title, text in articles if title in titles for p in text.split("\n"))
    for paragraph in paragraphs:
        texts.setdefault(key(paragraph)[:150], paragraph)
    passages = Passages(texts.values())
    answers = {}
    for question, answer, place in questions(folder):
        written = re.sub(r" ([?.,])", r"\1", detokenised(question.split()))
        answers[key(question)] = answer
        found = passages.find(question, answer, place) if key(question) not in seen else None
        if found is not None:
            seen.add(key(question))
            qas[passages.texts[found]][written] = as_written(answer, passages.texts[found])
    for text, found_qas in qas.items():
        yield Reading("squad", "", text, [(q, a) for q, a in found_qas.items() if a and a in text])
    rows = json.loads((folder / "sentences.json").read_text(encoding="utf-8"))
    for question, sentence in zip(rows["questions"], rows["answers"], strict=True):
        answer = as_written(answers.get(key(question), ""), sentence)
        if answer and key(question) not in seen:
            yield Reading("squad_sentences", "", sentence, [(question.strip(), answer)])
