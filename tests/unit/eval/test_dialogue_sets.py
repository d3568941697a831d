"""Dialogues from files: where documents and questions stand, and whose answers are judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragserve.errors import InvalidRequest
from ragserve.eval.dialogue_sets import ASK, load_dialogues


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def conversation(name: str, turns: int, **fields: Any) -> dict[str, Any]:
    said = [
        {"speaker": speaker, "text": f"{name} {word} {turn}"}
        for turn in range(1, turns + 1)
        for speaker, word in (("user", "asks"), ("agent", "says"))
    ]
    return {
        "conversation_id": name,
        "contexts": [{"document_id": "1", "text": f"{name} passage"}],
        "input": said[:-1],
        "targets": [{"speaker": "agent", "text": f"{name} target"}],
        "answerability": ["ANSWERABLE"],
    } | fields


def test_conversations_bring_their_passages_with_the_last_turn_or_the_first(tmp_path: Path) -> None:
    rows = [
        conversation("a", 4),
        conversation("short", 2),
        conversation("open", 4, answerability=["UNANSWERABLE"]),
        conversation("b", 3),
    ]
    late, early = load_dialogues(written(tmp_path / "talks.jsonl", rows), 3)
    assert [turn.question.question for turn in late] == ["a asks 2", "a asks 3", "a asks 4"]
    assert [turn.question.answers for turn in late] == [("a says 2",), ("a says 3",), ("a target",)]
    brought = [[[passage.text for passage in turn.documents] for turn in talk] for talk in (late, early)]
    assert brought == [[["b passage"], [], ["a passage"]], [["b passage"], [], []]]
    assert [turn.place for turn in late] == ["unknown", "unknown", "here"]
    assert [turn.place for turn in early] == ["unknown", "unknown", "earlier"]


def meeting(name: str, questions: int) -> dict[str, Any]:
    return {
        "meeting_transcripts": [{"speaker": name, "content": f"line {n} " + "x" * 500} for n in range(20)],
        "specific_query_list": [
            {"query": f"{name} {n}?", "answer": f"{name} {n}", "relevant_text_span": [[str(n), str(n + 3)]]}
            for n in range(questions)
        ],
    }


def test_questions_about_a_meeting_bring_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "meetings.jsonl", [meeting("A", 5), meeting("B", 2), meeting("C", 1)])
    first, second, third = load_dialogues(path, 2)
    assert [[turn.question.question for turn in talk] for talk in (first, second, third)] == [
        ["A 0?", "A 1?"],
        ["A 2?", "A 3?"],
        ["B 0?", "B 1?"],
    ]
    passages = first[1].documents
    assert [passage.title for passage in passages] == ["Meeting, line 1", "Meeting, line 3"]
    assert [line.split()[2] for passage in passages for line in passage.text.split("\n")] == list("1234")
    assert max(len(passage.text) for passage in passages) <= 1_500
    assert [turn.place for turn in second] == ["here", "earlier"], "every other dialogue brings them before"
    assert len(load_dialogues(path, 2, limit=4)) == 2


@pytest.mark.parametrize(
    ("at", "titles"),
    [
        ("end", ["d0", "e0", "f0"]),
        ("beginning", ["Question", "d0", "e0", "f0"]),
        ("middle", ["d0", "e0", "Question", "f0"]),
    ],
)
def test_a_question_stands_before_or_among_the_documents(tmp_path: Path, at: Any, titles: list[str]) -> None:
    rows = [
        {
            "question": f"What is {n}?",
            "answers": [str(n)],
            "docs": [[f"{letter}{n}", f"It is {n}."] for letter in "def"],
        }
        for n in range(4)
    ]
    here, earlier = load_dialogues(written(tmp_path / "set.jsonl", rows), 2, asked_at=at)
    assert [passage.title for passage in here[0].documents] == titles
    assert here[0].question.question == ("What is 0?" if at == "end" else ASK)
    assert at == "end" or "What is 0?" in [passage.text for passage in here[0].documents]
    assert here[0].question.answers == ("0",)
    assert earlier[1].question.question == "What is 3?", "a turn without documents asks as ever"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": [], "contexts": [], "targets": []}, "line 1: no dialogue in MTRAG's layout"),
        ({"meeting_transcripts": [{}]}, "line 1: no dialogue in QMSum's layout"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_dialogues(written(tmp_path / "broken.jsonl", [row]), 2)


def test_too_few_dialogues_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="fewer than two dialogues of 3 turns"):
        load_dialogues(written(tmp_path / "one.jsonl", [conversation("a", 3)]), 3)
