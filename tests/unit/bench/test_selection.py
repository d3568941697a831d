"""The share of answers kept, over a few questions whose figures can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ragserve.bench import dialogue, rerank, selection
from ragserve.commands import bench
from ragserve.errors import InvalidRequest

FILLER = "The weather of that year was mild and rainy, as people there remember. "
ROWS = [
    {
        "id": "words",
        "question": "who built the LIGHTHOUSE of skerryvore",
        "answers": ["Alan Stevenson"],
        "facts": ["The lighthouse of Skerryvore was built by Alan Stevenson in 1844. ", "Goats eat grass. "],
    },
    {
        "id": "unanswerable",
        "question": "Who wrote it?",
        "answers": ["Nobody knows this name"],
        "facts": ["A book. ", "A ship. "],
    },
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    rows = [
        {"id": row["id"], "question": row["question"], "answers": row["answers"]}
        | {"ctxs": [{"title": "T", "text": FILLER * 4 + f + FILLER * 4, "gold": True} for f in row["facts"]]}
        for row in ROWS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_kept_by_signal_and_share(data: Path, tmp_path: Path) -> None:
    found = selection.run(tmp_path / "out", data=[data])
    assert {row["questions"] for row in found["rows"]} == {1}, "a question without its answer proves nothing"
    as_asked = {row["signal"]: row for row in found["rows"] if row["question"] == "as asked"}
    assert set(as_asked) == {*selection.SIGNALS, selection.BEST_PASSAGES}
    assert as_asked["words"]["15%"] == 100.0
    assert as_asked["words, document, sentence"]["15%"] == 100.0
    assert as_asked["best passages whole"]["40%"] == 0.0, "a passage is half of the text"
    spellings = [row["question"] for row in found["rows"] if row["signal"] == "words"]
    assert spellings == list(selection.SPELLINGS)
    assert json.loads((tmp_path / "out" / "selection.json").read_text())["rows"] == found["rows"]


def test_the_command_asks_for_question_sets(data: Path) -> None:
    app = typer.Typer()
    bench.register(app)
    result = CliRunner().invoke(app, ["selection", "--quick", "--no-write", "--data", str(data)])
    assert result.exit_code == 0, result.output
    with pytest.raises(InvalidRequest, match="needs question sets"):
        selection.run(None)


def test_a_typo_is_one_swap_and_always_the_same() -> None:
    question = "who built the lighthouse"
    wrong = selection.with_typo(question)
    assert wrong == selection.with_typo(question)
    assert sorted(wrong) == sorted(question)
    assert wrong != question or sum(a != b for a, b in zip(wrong, question, strict=True)) in (0, 2)
    assert selection.with_typo("a b c") == "a b c"


@pytest.mark.parametrize("run", [selection.run, rerank.run, dialogue.run], ids=lambda run: run.__module__)
def test_two_sets_of_one_name_are_refused(data: Path, tmp_path: Path, run: Callable[..., object]) -> None:
    other = tmp_path / "small.test.jsonl"
    other.write_text(data.read_text())
    with pytest.raises(InvalidRequest, match="same name, 'small'"):
        run(None, data=[data, other])
