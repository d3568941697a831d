"""Question sets: JSON lines, plain or gzip.

A row is ``{id, docs: [[title, text], ...], question, answers, kind}`` or ``{id, question, answers, ctxs:
[{title, text, gold}, ...]}``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ragserve.errors import InvalidRequest
from ragserve.json_lines import json_lines
from ragserve.verification.metrics import contains_answer

T = TypeVar("T")
Half = Literal["first", "second"]
"""Part of a set: what is chosen on one half is reported on the other."""


@dataclass(frozen=True, slots=True)
class GivenPassage:
    """A document of a question set."""

    title: str
    text: str

    @property
    def key(self) -> str:
        """Digest of title and text: the same passage in two rows is one document."""
        return hashlib.sha256(f"{self.title}\0{self.text}".encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its accepted answers and its documents in order; ``gold``: the documents that hold the
    answer."""

    id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[GivenPassage, ...]
    gold: tuple[GivenPassage, ...]
    kind: str


def load(path: Path, limit: int | None = None, half: Half | None = None) -> list[Question]:
    """Load the questions of a file, or of ``half`` of it, in order; with ``limit``, that many spread evenly
    over it, the same ones each time.

    Raises InvalidRequest with file, line and reason; of two rows with one id, too."""
    rows: list[Question] = []
    lines: dict[str, int] = {}
    for number, row in json_lines(path, "Give a .jsonl or .jsonl.gz file."):
        question = _question(row, path, number)
        first = lines.setdefault(question.id, number)
        if first != number:
            raise InvalidRequest(
                f"{path}, line {number}: id {question.id!r} is that of line {first}, too.",
                hint="Give each row an id of its own. A row without one has its line's number.",
            )
        rows.append(question)
    if not rows:
        raise InvalidRequest(
            f"{path} holds no questions.", hint="Expected one JSON object a line; see ragserve/eval/data.py."
        )
    return spread(half_of(rows, half, path), limit)


def halved(rows: list[T], half: Half | None) -> list[T]:
    """The rows of a half by their place in the set: of an odd number the first half has one more. None:
    all."""
    middle = (len(rows) + 1) // 2
    return rows if half is None else rows[:middle] if half == "first" else rows[middle:]


def half_of(rows: list[T], half: Half | None, path: Path) -> list[T]:
    """As `halved`, of the rows of a file. Raises InvalidRequest for a half without rows."""
    found = halved(rows, half)
    if not found:
        raise InvalidRequest(
            f"The {half} half of {path} has no questions.", hint="Leave --half away, or give more questions."
        )
    return found


def spread(rows: list[T], limit: int | None) -> list[T]:
    """At most ``limit`` rows, spread evenly over all, the same ones each time."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]


def set_name(path: Path) -> str:
    """A set's name: its file name up to the first dot."""
    return path.name.split(".")[0]


def by_name(paths: Iterable[Path]) -> dict[str, Path]:
    """The files by the names of their sets, which rows and reports are kept by. Raises InvalidRequest for two
    sets of one name."""
    named: dict[str, Path] = {}
    for path in paths:
        name = set_name(path)
        if name in named:
            raise InvalidRequest(
                f"Two sets have the same name, {name!r}: {named[name]} and {path}.",
                hint="A set's name is that of its file, up to the first dot: rename one of them.",
            )
        named[name] = path
    return named


def find(name: str, folder: Path | None) -> Path:
    """Find the file of a set: a path, or the name of a set in ``folder``.

    Looks for ``NAME.jsonl[.gz]`` in the folder and in its subfolder ``synthetic``, then in the subfolder of
    the set's name (``*.uniform.jsonl[.gz]`` first). Raises InvalidRequest saying where it looked."""
    path = Path(name)
    if path.suffix in {".jsonl", ".gz"} or path.is_file():
        return path
    if folder is None:
        raise InvalidRequest(
            f"{name!r} is not a file.",
            hint="Give a .jsonl or .jsonl.gz file, or --sets FOLDER and the name of a set in it.",
        )
    endings = (".jsonl", ".jsonl.gz")
    places = [parent / f"{name}{ending}" for parent in (folder, folder / "synthetic") for ending in endings]
    for pattern in ("*.uniform.jsonl*", "*.jsonl*"):
        places += sorted((folder / name).glob(pattern))
    for place in places:
        if place.is_file():
            return place
    raise InvalidRequest(
        f"No set {name!r} in {folder}.",
        hint=f"Looked for {name}.jsonl[.gz] there, in synthetic/ and in {name}/.",
    )


def interleaved(sets: Mapping[str, Sequence[Question]]) -> list[tuple[str, Question]]:
    """Interleave the sets' questions, so that any beginning of the list holds about the same share of every
    set."""
    places = [
        (number / len(questions), name, question)
        for name, questions in sets.items()
        for number, question in enumerate(questions)
    ]
    return [(name, question) for _, name, question in sorted(places, key=lambda place: place[0])]


def distinct_passages(questions: Sequence[Question]) -> list[GivenPassage]:
    """Return all documents of a set, without duplicates, in order of first appearance."""
    return list(dict.fromkeys(passage for question in questions for passage in question.documents))


def _question(row: Any, path: Path, number: int) -> Question:
    try:
        if "ctxs" in row:
            documents = tuple(GivenPassage(str(c["title"]), str(c["text"])) for c in row["ctxs"])
            marked = tuple(d for d, c in zip(documents, row["ctxs"], strict=True) if c.get("gold"))
        else:
            documents = tuple(GivenPassage(str(title), str(text)) for title, text in row["docs"])
            marked = ()
        answers = tuple(str(answer) for answer in row["answers"])
        question = str(row["question"])
        name = str(row.get("id", number))
        kind = str(row.get("kind", ""))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path}, line {number}: not a row of a question set ({type(error).__name__}: {error}).",
            hint="Expected {id, docs: [[title, text], ...], question, answers} "
            "or {id, question, answers, ctxs: [{title, text, gold}]}.",
        ) from error
    if not answers or not documents or not question.strip():
        raise InvalidRequest(f"{path}, line {number}: question, answers and documents must not be empty.")
    return Question(
        name, question, answers, documents, marked or _inferred_gold(question, answers, documents), kind
    )


def _inferred_gold(
    question: str, answers: Sequence[str], documents: Sequence[GivenPassage]
) -> tuple[GivenPassage, ...]:
    """Guess the gold documents of a set without marks: those that contain an answer; of these, if any, those
    whose title the question names."""
    holding = [d for d in documents if contains_answer(d.text, answers)]
    named = [d for d in holding if d.title and contains_answer(question, [d.title])]
    return tuple(named or holding)
