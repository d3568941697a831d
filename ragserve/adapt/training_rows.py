"""Questions to train with: JSON lines, plain, .gz or .xz.

A row is ``{question, answer, passages: [{title, text}], gold: [numbers]}``. ``passages``: what a search would
find, best first; ``gold``: those of them that hold the answer, counted from 0; ``about``: those that the
question was made from, where others hold its answer by chance. ``answer`` may be null: it is for the guards
alone, as training goes by what the model itself says over the whole prompt. Other fields are ignored."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ragserve.errors import InvalidRequest
from ragserve.files import write_text
from ragserve.json_lines import json_lines

LEAST = 50  # questions of a run
LEAST_HELD_OUT = 10  # of these
_HINT = (
    'A line is {"question": "...", "answer": "...", "passages": [{"title": "...", "text": "..."}], '
    '"gold": [0]}; see docs/adapt.md.'
)
_SHOWN = 10  # bad lines
_NonEmpty = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class TrainingPassage(BaseModel):
    """A passage as the prompt shows it."""

    model_config = ConfigDict(frozen=True)

    title: str = ""
    text: _NonEmpty


class TrainingRow(BaseModel):
    """A question with its passages."""

    model_config = ConfigDict(frozen=True)

    question: _NonEmpty
    answer: _NonEmpty | None = None
    passages: Annotated[tuple[TrainingPassage, ...], Field(min_length=1)]
    gold: tuple[Annotated[int, Field(ge=0)], ...] = ()
    about: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _gold_exists(self) -> TrainingRow:
        for name in ("gold", "about"):
            if any(number >= len(self.passages) for number in getattr(self, name)):
                raise ValueError(f"{name} names a passage that is not among the {len(self.passages)}")
        return self

    @property
    def gold_texts(self) -> set[str]:
        """The passages that answer."""
        return {self.passages[number].text for number in self.gold}

    @property
    def subjects(self) -> set[str]:
        """The passages that the question is about: ``about``, or else all that answer."""
        return {self.passages[number].text for number in self.about or self.gold}

    @property
    def subject(self) -> str:
        """Equal for questions about all the same passages."""
        about = sorted(self.subjects) or [self.question]
        return hashlib.sha256("\0".join(about).encode()).hexdigest()


def read_rows(path: Path) -> list[TrainingRow]:
    """Read a file's rows. Raises InvalidRequest that names the bad lines, each with its reason."""
    rows: list[TrainingRow] = []
    bad: list[str] = []
    for number, value in json_lines(path, _HINT):
        try:
            rows.append(TrainingRow.model_validate(value))
        except ValidationError as error:
            bad.append(f"line {number}: {_reasons(error)}")
    if bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InvalidRequest(f"{path}: {'; '.join(bad[:_SHOWN])}{more}.", hint=_HINT)
    return rows


def write_rows(path: Path, rows: Iterable[TrainingRow]) -> None:
    """Write rows as `read_rows` reads them, atomically, readable by this user alone."""
    lines = (json.dumps(row.model_dump(mode="json"), ensure_ascii=False) for row in rows)
    write_text(path, "".join(f"{line}\n" for line in lines), mode=0o600)


def digest_of_rows(rows: Sequence[TrainingRow]) -> str:
    """16 hex digits of the rows' contents."""
    found = hashlib.sha256()
    for row in rows:
        found.update(row.model_dump_json().encode())
    return found.hexdigest()[:16]


def divided(
    rows: Sequence[TrainingRow], held_out: int, seed: int
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Divide rows into those to train with and at most ``held_out`` others, a fifth at most. No row is
    trained with that is about a passage which a held-out one is about (`TrainingRow.subjects`). Raises
    InvalidRequest for fewer rows than `LEAST`, and where too few are held out or left."""
    if len(rows) < LEAST:
        raise InvalidRequest(
            f"There are {len(rows)} questions; at least {LEAST} are needed.",
            hint="Give more questions with --data, or a --namespace with more passages.",
        )
    subjects = sorted({row.subject for row in rows})
    random.Random(seed).shuffle(subjects)
    wanted, chosen, count = min(held_out, len(rows) // 5), set(), 0
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.subject] = sizes.get(row.subject, 0) + 1
    for subject in subjects:
        if count + sizes[subject] <= wanted:
            chosen.add(subject)
            count += sizes[subject]
    held = [row for row in rows if row.subject in chosen]
    taken = {text for row in held for text in row.subjects}
    train = [row for row in rows if row.subject not in chosen and not taken & row.subjects]
    if len(held) < LEAST_HELD_OUT or len(train) < LEAST - LEAST_HELD_OUT:
        raise InvalidRequest(
            f"Only {len(held)} of {len(rows)} questions can be held out, with {len(train)} about other "
            f"passages to train with; {LEAST_HELD_OUT} and {LEAST - LEAST_HELD_OUT} are needed.",
            hint="Too many are about the same gold passages: give questions about others, too.",
        )
    return train, held


def _reasons(error: ValidationError) -> str:
    details: Sequence[Any] = error.errors(include_url=False, include_input=False)
    return ", ".join(f"{'.'.join(map(str, each['loc'])) or 'row'}: {each['msg']}" for each in details)
