"""Questions about one's own documents, which are in a namespace or folder: JSON lines, plain or gzip.

A row is ``{id, question, answers, documents, passages, namespace}``; only ``question`` must be there:

- ``answers``: accepted answers;
- ``documents``: the documents that hold the answer, each by its source, the end of its source (``b.pdf`` or
  ``a/b.pdf`` of ``/data/a/b.pdf``) or its doc_id;
- ``passages``: the passages that hold it, word for word;
- ``namespace``: where to ask, if not where the others are asked;
- ``id``: by default the line's number.

Other fields are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, model_validator

from ragserve.config import Namespace
from ragserve.errors import InvalidRequest
from ragserve.eval.data import Half, half_of, spread
from ragserve.json_lines import json_lines

_HINT = 'A line is {"question": "...", "answers": ["..."], "documents": ["..."]}; see docs/evaluation.md.'
_SHOWN = 10  # bad lines
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class OwnQuestion(BaseModel):
    """A question, and what is known of its answer."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: Text
    question: Text
    answers: tuple[Text, ...] = ()
    documents: tuple[Text, ...] = ()
    passages: tuple[Text, ...] = ()
    namespace: Namespace | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, row: Any) -> Any:
        """Take a single text for a list of one."""
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        names = ("answers", "documents", "passages")
        return row | {name: [row[name]] for name in names if isinstance(row.get(name), str)}


def load_own(path: Path, limit: int | None = None, half: Half | None = None) -> list[OwnQuestion]:
    """Load the questions of a file, or of ``half`` of it, in order; with ``limit``, that many spread evenly
    over it.

    Raises InvalidRequest that names the bad lines, each with its reason, and for a half without questions."""
    found: dict[str, OwnQuestion] = {}
    bad: list[str] = []
    for number, row in json_lines(path, _HINT):
        try:
            default = {"id": str(number)} if isinstance(row, dict) else {}
            question = OwnQuestion.model_validate(default | row if default else row)
        except ValidationError as error:
            bad.append(f"line {number}: {_reasons(error)}")
            continue
        if question.id in found:
            bad.append(f"line {number}: id {question.id!r} is there twice")
        found[question.id] = question
    if bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise InvalidRequest(f"{path}: {'; '.join(bad[:_SHOWN])}{more}.", hint=_HINT)
    if not found:
        raise InvalidRequest(f"{path} holds no questions.", hint=_HINT)
    return spread(half_of(list(found.values()), half, path), limit)


def _reasons(error: ValidationError) -> str:
    details: Sequence[Any] = error.errors(include_url=False, include_input=False)
    return ", ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"]
        for each in details
    )
