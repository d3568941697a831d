"""Question sets as they come, and as they should not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ragserve.errors import InvalidRequest
from ragserve.eval.data import GivenPassage, distinct_passages, load

DATA = Path(__file__).parents[2] / "data" / "questions"


def test_rows_with_docs_and_inferred_gold() -> None:
    questions = load(DATA / "onehop_8.jsonl")
    assert len(questions) == 8
    first = questions[0]
    assert (first.id, first.question, first.answers) == (
        "onehop-0",
        "Where can Hash Bridge be seen?",
        ("Beshgate",),
    )
    # "Hash Bridge" and "Beshgate" both say the answer; the question names the first
    assert [p.title for p in first.gold] == ["Hash Bridge"]
    assert len(distinct_passages(questions)) == 64


def test_rows_with_marked_contexts(tmp_path: Path) -> None:
    row = {
        "id": 7,
        "question": "Who?",
        "answers": ["x"],
        "ctxs": [{"title": "A", "text": "x", "gold": False}, {"title": "B", "text": "y", "gold": True}],
    }
    path = tmp_path / "set.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(row) + "\n\n" + json.dumps({**row, "id": 8}) + "\n")
    one, two = load(path)
    assert one.gold == (GivenPassage("B", "y"),)
    assert distinct_passages([one, two]) == [GivenPassage("A", "x"), GivenPassage("B", "y")]


def test_limit_spreads_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": i, "question": "q", "answers": ["a"], "docs": [["t", "a"]]}) + "\n"
            for i in range(10)
        )
    )
    assert [q.id for q in load(path, 4)] == ["0", "2", "5", "7"]
    assert load(path, 4) == load(path, 4)
    assert len(load(path, 99)) == 10


def test_halves_are_apart_and_together_the_set(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    row = {"question": "q", "answers": ["a"], "docs": [["t", "a"]]}
    path.write_text("".join(json.dumps({"id": i, **row}) + "\n" for i in range(7)))
    first, second = load(path, half="first"), load(path, half="second")
    assert [q.id for q in first] == ["0", "1", "2", "3"]
    assert first + second == load(path)
    assert [q.id for q in load(path, 2, "second")] == ["4", "5"], "the limit is of the half"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no questions"),
        (b"{not json\n", "line 1: not JSON"),
        (b'\n{"question": "q"}\n', "line 2: not a row"),
        (b'{"question": "q", "answers": [], "docs": [["t", "x"]]}\n', "must not be empty"),
        (b'{"question": "q", "answers": ["a"], "docs": [["t"]]}\n', "not a row"),
        (b"[]\n", "not a row"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
    ids=["empty", "broken", "incomplete", "no-answers", "document-without-text", "list", "not-utf8"],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=says):
        load(path)


def test_missing_and_truncated(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        load(tmp_path / "nowhere.jsonl")
    whole = gzip.compress(b'{"question": "q", "answers": ["a"], "docs": [["t", "a"]]}\n' * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load(tmp_path / "cut.jsonl.gz")
