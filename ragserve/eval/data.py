"""Question sets: JSON lines, plain or gzip.

A row is ``{id, docs: [[title, text], ...], question, answers, kind}`` or ``{id, question, answers, ctxs: [{title, text, gold}, ...]}``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest
from ragserve.eval.metrics import contains_answer


@dataclass(frozen=True, slots=True)
class Passage:
    """A document of a question set. ``key`` depends on title and text alone, so the same passage in two rows is one document."""

    title: str
    text: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.title}\0{self.text}".encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its accepted answers and its documents in order; ``gold`` are those of them that hold the answer."""

    id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[Passage, ...]
    gold: tuple[Passage, ...]
    kind: str


def load(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a file, in order; with ``limit``, that many spread evenly over it, the same ones each time.

    Raises ``InvalidRequest`` naming file, line and what is wrong.
    """
    rows = [_question(row, path, number) for number, row in _lines(path)]
    if not rows:
        raise InvalidRequest(f"{path} holds no questions.", hint="Expected one JSON object a line; see ragserve/eval/data.py.")
    if limit is None or limit >= len(rows):
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]


def distinct_passages(questions: Sequence[Question]) -> list[Passage]:
    """All documents of a set, each title and text once, in order of first appearance."""
    return list(dict.fromkeys(passage for question in questions for passage in question.documents))


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except json.JSONDecodeError as error:
                        raise InvalidRequest(f"{path}, line {number}: not JSON ({error.msg}).") from error
    except FileNotFoundError as error:
        raise InvalidRequest(f"{path} does not exist.", hint="Give a .jsonl or .jsonl.gz file.") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def _question(row: Any, path: Path, number: int) -> Question:
    try:
        if "ctxs" in row:
            documents = tuple(Passage(str(c["title"]), str(c["text"])) for c in row["ctxs"])
            marked = tuple(d for d, c in zip(documents, row["ctxs"], strict=True) if c.get("gold"))
        else:
            documents = tuple(Passage(str(title), str(text)) for title, text in row["docs"])
            marked = ()
        answers = tuple(str(answer) for answer in row["answers"])
        question = str(row["question"])
        name = str(row.get("id", number))
        kind = str(row.get("kind", ""))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path}, line {number}: not a row of a question set ({type(error).__name__}: {error}).",
            hint="Expected {id, docs: [[title, text], ...], question, answers} or {id, question, answers, ctxs: [{title, text, gold}]}.",
        ) from error
    if not answers or not documents or not question.strip():
        raise InvalidRequest(f"{path}, line {number}: question, answers and documents must not be empty.")
    return Question(name, question, answers, documents, marked or _inferred_gold(question, answers, documents), kind)


def _inferred_gold(question: str, answers: Sequence[str], documents: Sequence[Passage]) -> tuple[Passage, ...]:
    """Sets without marks: the documents that say an answer, and of these, if there are any, those whose title the question names."""
    saying = [d for d in documents if contains_answer(d.text, answers)]
    named = [d for d in saying if d.title and contains_answer(question, [d.title])]
    return tuple(named or saying)
