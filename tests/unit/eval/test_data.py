"""Question sets as they come, and as they should not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ragserve.errors import InvalidRequest
from ragserve.eval.data import GivenPassage, by_name, distinct_passages, load
from ragserve.eval.own_questions import load_own
from ragserve.eval.sparse_calibration import tasks_of

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


def test_a_half_without_questions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"question": "q", "answers": ["a"], "docs": [["t", "a"]]}) + "\n")
    assert len(load(path, half="first")) == len(load_own(path, half="first")) == 1
    for read in (load, load_own):
        with pytest.raises(InvalidRequest, match=r"second half of .*set\.jsonl has no questions"):
            read(path, half="second")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (["a", "b", "a"], "line 3: id 'a' is that of line 1"),
        ([7, "7"], "line 2: id '7' is that of line 1"),
        (["2", None], "line 2: id '2' is that of line 1"),
    ],
    ids=["repeated", "as number and as text", "a line's number"],
)
def test_rows_that_share_an_id_are_refused(tmp_path: Path, ids: list[Any], says: str) -> None:
    row = {"question": "q", "answers": ["a"], "docs": [["t", "a"]]}
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(json.dumps(row if one is None else row | {"id": one}) for one in ids))
    with pytest.raises(InvalidRequest, match=says):
        load(path)


def test_sets_that_share_a_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "hotpot.dev.jsonl", tmp_path / "squad.jsonl.gz", tmp_path / "hotpot.test.jsonl"]
    assert by_name(paths[:2]) == {"hotpot": paths[0], "squad": paths[1]}
    with pytest.raises(InvalidRequest, match=r"'hotpot': .*hotpot\.dev\.jsonl and .*hotpot\.test\.jsonl"):
        by_name(paths)
    with pytest.raises(InvalidRequest, match="'hotpot'"):
        tasks_of([paths[0], paths[0]], None)


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
