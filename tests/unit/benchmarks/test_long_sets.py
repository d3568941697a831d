"""Contexts of a wanted length out of LongEval, key-value retrieval, QMSum and MTRAG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.long_sets import LONG, tasks_of
from ragserve.errors import InvalidRequest
from ragserve.eval.sparse_answers import SparseTask


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    names = [f"word-{number}" for number in range(200)]
    lines = [f"line {name}: REGISTER_CONTENT is <{number}>" for number, name in enumerate(names)]
    rows = [
        {
            "random_idx": [names[place], place],
            "expected_number": place,
            "correct_line": f"{lines[place]}\n",
            "prompt": "Now the record start:\n\n" + "\n".join(lines[:100]) + "\n\nNow the record is over.",
        }
        for place in range(0, 100, 10)
    ]
    pairs = [[f"key{number}", f"value{number}"] for number in range(300)]
    kv = [
        {"ordered_kv_records": pairs[at : at + 75], "key": f"key{at}", "value": f"value{at}"}
        for at in (0, 75, 150)
    ]
    said = [{"speaker": "A", "content": f"point {number} is fine"} for number in range(100)]
    meetings = [
        {
            "meeting_transcripts": said,
            "specific_query_list": [
                {"query": "What of 40?", "answer": "It is fine.", "relevant_text_span": [["40", "42"]]},
                {"query": "What of 0?", "answer": "It is fine.", "relevant_text_span": [["0", "1"]]},
            ],
        }
    ]
    talks = [
        {
            "task_id": str(number),
            "Collection": "one",
            "contexts": [{"text": f"passage {number} says this"}],
            "answerability": ["ANSWERABLE" if number % 2 else "UNANSWERABLE"],
            "input": [
                {"speaker": "user", "text": "Hello"},
                {"speaker": "agent", "text": "Yes?"},
                {"speaker": "user", "text": f"And {number}?"},
            ],
            "targets": [{"text": "This."}],
        }
        for number in range(20)
    ]
    made: dict[str, Any] = {
        "longeval/lines_200.jsonl": rows,
        "kv_retrieval/kv-retrieval-75_keys.jsonl": kv,
        "qmsum/test.jsonl": meetings,
        "mtrag_un/reference.jsonl": talks,
    }
    for name, each in made.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in each))
    return tmp_path


def text_of(task: SparseTask) -> str:
    return "\n".join(document.text for document in task.question.documents)


@pytest.mark.parametrize("name", ["lines", "kv", "qmsum", "mtrag_un"])
@pytest.mark.parametrize("room", [40, 70])
def test_contexts_have_the_length_and_what_the_answer_needs(data: Path, name: str, room: int) -> None:
    tasks = tasks_of(f"{name}@{room}", data, words)
    assert tasks
    assert tasks == tasks_of(f"{name}@{room}", data, words), "the same each time"
    for task in tasks:
        assert task.set == f"{name}@{room}"
        assert room / 2 < words(text_of(task)) <= room
        if task.score == "contains":
            assert task.question.answers[0] in text_of(task)
        assert (task.max_new_tokens == LONG) == (task.system is not None) == (task.score == "f1")
    assert len({task.question.id for task in tasks}) == len(tasks)


def test_what_a_question_is_about_stays(data: Path) -> None:
    middle, start = tasks_of("qmsum@30", data, words)
    assert "point 40" in text_of(middle)
    assert "point 42" in text_of(middle)
    assert "point 39" in text_of(middle), "and lines on both sides"
    assert text_of(start).startswith("A: point 0")
    for task in tasks_of("mtrag_un@30", data, words):
        assert f"passage {task.question.id} says" in text_of(task)
        assert [message.role for message in task.history] == ["user", "assistant"]
    assert len(tasks_of("mtrag_un@30", data, words)) == 10, "answerable ones"


@pytest.mark.parametrize("name", ["lines", "kv", "mtrag_un"])
def test_a_question_has_the_same_context_under_any_limit(data: Path, name: str) -> None:
    whole = {task.question.id: task for task in tasks_of(f"{name}@40", data, words)}
    part = tasks_of(f"{name}@40", data, words, limit=2)
    assert part == [whole[task.question.id] for task in part]


def test_a_part_of_a_set(data: Path) -> None:
    whole = tasks_of("lines@40", data, words)
    assert len(tasks_of("lines@40", data, words, limit=3)) == 3
    assert len(tasks_of("lines@40", data, words, half="second")) == len(whole) // 2


@pytest.mark.parametrize(
    ("name", "said"), [("lines", "How long"), ("lines@x", "How long"), ("other", "No set")]
)
def test_a_wrong_name_is_an_error_that_says_what_to_write(data: Path, name: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        tasks_of(name, data, words)
