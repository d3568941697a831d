"""Dialogues of several turns from a set's file: question sets, whose rows are joined, and sets of dialogues.

MTRAG's conversations have reference passages for their last question only; earlier turns are judged by what
the person beside it said. Half of the dialogues bring these passages with the last turn, behind those of
another conversation, half with the first turn. QMSum's questions about a meeting bring what was said in the
lines that their answers are from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ragserve.errors import InvalidRequest
from ragserve.eval.data import GivenPassage, Half, Question, halved, load, spread
from ragserve.eval.multiturn import DialogueTurn, alternating, dialogues_of
from ragserve.json_lines import json_lines

AskedAt = Literal["beginning", "middle", "end"]
"""Where a turn's question stands: before, among or after the documents that it brings."""
ASK = "Answer the question that stands among the documents."
_PASSAGE_CHARS = 1_500
Dialogue = list[DialogueTurn]


def load_dialogues(
    path: Path,
    turns: int,
    limit: int | None = None,
    asked_at: AskedAt = "end",
    ahead: int = 1,
    half: Half | None = None,
) -> list[Dialogue]:
    """Load dialogues of ``turns`` turns; with ``limit``, of so many questions together, spread over the file.
    ``ahead``: turns by which documents come before their question, in half of the dialogues of a question
    set. ``half``: of the file's questions or dialogues.

    Raises InvalidRequest with file, line and reason, and if there are fewer than two dialogues."""
    _, first = next(json_lines(path), (0, None))
    kinds = {"meeting_transcripts": _qmsum, "input": _mtrag}
    make = next((kinds[name] for name in kinds if isinstance(first, dict) and name in first), None)
    if make is None:
        dialogues = dialogues_of(load(path, limit, half), turns, ahead)
    else:
        dialogues = spread(halved(make(path, turns), half), None if limit is None else limit // turns)
        if len(dialogues) < 2:
            raise InvalidRequest(
                f"{path} has fewer than two dialogues of {turns} turns, or the limit leaves fewer.",
                hint="Give a larger --limit, or a smaller --turns.",
            )
    return [[_asked(turn, asked_at) for turn in dialogue] for dialogue in dialogues]


def _asked(turn: DialogueTurn, at: AskedAt) -> DialogueTurn:
    """The turn with its question where it shall stand, as a document of its own."""
    documents = turn.documents
    if at == "end" or not documents:
        return turn
    place = 0 if at == "beginning" else (len(documents) + 1) // 2
    question = GivenPassage("Question", turn.question.question)
    return replace(
        turn,
        question=replace(turn.question, question=ASK),
        documents=(*documents[:place], question, *documents[place:]),
    )


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The lines of a set of dialogues. Raises InvalidRequest for what is no object."""
    for number, row in json_lines(path):
        if not isinstance(row, dict):
            raise InvalidRequest(f"{path}, line {number}: not a JSON object.")
        yield number, row


def _mtrag(path: Path, turns: int) -> list[Dialogue]:
    kept: list[tuple[list[Question], tuple[GivenPassage, ...]]] = []
    for number, row in _rows(path):
        try:
            passages = tuple(GivenPassage(str(c.get("title", "")), str(c["text"])) for c in row["contexts"])
            said = [(str(one["speaker"]), str(one["text"])) for one in row["input"]]
            target = str(row["targets"][0]["text"])
            name = str(row.get("conversation_id", number))
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise _no_dialogue(path, number, "MTRAG", error) from error
        pairs = [
            (text, reply)
            for (speaker, text), (_, reply) in pairwise([*said, ("agent", target)])
            if speaker == "user"
        ][-turns:]
        if passages and len(pairs) == turns and "ANSWERABLE" in row.get("answerability", ["ANSWERABLE"]):
            asked = [
                Question(f"{name} {place}", text, (reply,), (), (), "")
                for place, (text, reply) in enumerate(pairs, 1)
            ]
            kept.append((asked, passages))
    return [
        _conversation(asked, passages, kept[number - 1][1], late=number % 2 == 0)
        for number, (asked, passages) in enumerate(kept)
    ]


def _conversation(
    asked: Sequence[Question],
    passages: tuple[GivenPassage, ...],
    foreign: tuple[GivenPassage, ...],
    *,
    late: bool,
) -> Dialogue:
    first, *between = asked[:-1]
    last = replace(asked[-1], documents=passages, gold=passages)
    return [
        DialogueTurn(first, foreign if late else passages, "unknown"),
        *(DialogueTurn(question, (), "unknown") for question in between),
        DialogueTurn(last, passages if late else (), "here" if late else "earlier"),
    ]


def _qmsum(path: Path, turns: int) -> list[Dialogue]:
    groups: list[list[Question]] = []
    for number, row in _rows(path):
        try:
            said = [f"{line['speaker']}: {line['content']}" for line in row["meeting_transcripts"]]
            questions = [
                _about_lines(f"{number} {place}", one, said)
                for place, one in enumerate(row["specific_query_list"], 1)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _no_dialogue(path, number, "QMSum", error) from error
        groups += [questions[at : at + turns] for at in range(0, len(questions) - turns + 1, turns)]
    return alternating(groups)


def _about_lines(name: str, query: dict[str, Any], said: Sequence[str]) -> Question:
    """A question, with the lines that it is about as passages."""
    passages: list[GivenPassage] = []
    for span in query["relevant_text_span"]:
        first, last = map(int, span)
        begin, lines = first, list[str]()
        for number, line in enumerate(said[first : last + 1], first):
            if lines and len("\n".join([*lines, line])) > _PASSAGE_CHARS:
                passages.append(GivenPassage(f"Meeting, line {begin}", "\n".join(lines)))
                begin, lines = number, []
            lines.append(line)
        passages.append(GivenPassage(f"Meeting, line {begin}", "\n".join(lines)))
    found = tuple(passages)
    return Question(name, str(query["query"]), (str(query["answer"]),), found, found, "")


def _no_dialogue(path: Path, number: int, layout: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(
        f"{path}, line {number}: no dialogue in {layout}'s layout ({type(error).__name__}: {error})."
    )
