"""Sets whose passages stand among others, made of a small set and invented articles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.long_contexts import main, passages_of
from ragserve.errors import InvalidRequest
from ragserve.eval.data import Question, load
from ragserve.verification.metrics import contains_answer

TOWNS = [f"Town{number}" for number in range(40)]


def article(town: str, number: int) -> dict[str, str]:
    """Two passages, of which the second of every fifth names the answer."""
    keeper = "Alan Stevenson" if number % 5 == 0 else "nobody in particular"
    about = "the lighthouse of Skerryvore was lit" if number % 3 == 0 else "the mill grinds corn"
    first = f"{town} is a place where {about} long ago. " * 10
    second = f"The market of {town} is kept by {keeper} every week of the year. " * 8
    return {"title": town, "text": f"{first}\n{second}"}


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    path = tmp_path / "articles.jsonl"
    path.write_text("".join(json.dumps(article(town, n)) + "\n" for n, town in enumerate(TOWNS)))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    ctxs = [
        {"title": "Skerryvore", "text": "It was built by Alan Stevenson.", "gold": True},
        {"title": "Soup", "text": "Leeks and potatoes.", "gold": False},
    ]
    row = {"question": "Who built the lighthouse of Skerryvore?", "answers": ["Alan Stevenson"], "ctxs": ctxs}
    path.write_text("".join(json.dumps({"id": str(n), **row}) + "\n" for n in range(3)))
    return path


def made(tmp_path: Path, articles: Path, questions: Path, *arguments: str) -> dict[str, list[Question]]:
    out = tmp_path / "out"
    places = (str(out), str(questions), "--articles", str(articles), "--others", "6,20")
    assert main([*places, *arguments]) == 0
    return {path.stem: load(path) for path in sorted(out.glob("*.jsonl"))}


@pytest.mark.parametrize("embedder", [["--embedder", "bm25"], []], ids=["bm25", "default"])
def test_half_are_near_and_none_tells_the_answer(
    tmp_path: Path, articles: Path, questions: Path, embedder: list[str]
) -> None:
    found = made(tmp_path, articles, questions, *embedder)
    assert set(found) == {"small_6", "small_20"}
    few, many = found["small_6"], found["small_20"]
    assert [len(question.documents) for question in many] == [22] * 3
    [before, *_] = load(questions)
    for question in (*few, *many):
        assert question.gold == before.gold
        others = [each for each in question.documents if each not in before.documents]
        assert len(others) == len(question.documents) - 2
        assert not any(contains_answer(f"{each.title} {each.text}", question.answers) for each in others)
    near = [sum("Skerryvore" in each.text for each in question.documents) for question in few]
    assert min(near) >= 3, "half of six"
    assert any("Skerryvore" not in each.text for each in few[0].documents[2:])


def test_sets_are_the_same_each_time_and_the_smaller_in_the_larger(
    tmp_path: Path, articles: Path, questions: Path
) -> None:
    found = made(tmp_path, articles, questions, "--embedder", "bm25")
    again = made(tmp_path, articles, questions, "--embedder", "bm25")
    other = made(tmp_path, articles, questions, "--embedder", "bm25", "--seed", "1")
    assert found == again != other
    for few, many in zip(found["small_6"], found["small_20"], strict=True):
        assert set(few.documents) < set(many.documents)
    first, second, _ = found["small_20"]
    places = {question.documents.index(question.gold[0]) for question in found["small_20"]}
    assert len(places) > 1, "the gold passage stands anywhere"
    assert set(first.documents) != set(second.documents)


def test_too_few_articles_are_refused(tmp_path: Path, articles: Path, questions: Path) -> None:
    with pytest.raises(InvalidRequest, match="fewer than 250"):
        main([str(tmp_path / "out"), str(questions), "--articles", str(articles), "--embedder", "bm25"])


def test_articles_are_cut_at_ends_of_sentences() -> None:
    text = "One two three. Four five six!\nSeven eight. Nine ten eleven twelve."
    cut = [each.text for each in passages_of("t", text, words=5)]
    assert cut == ["One two three. Four five six!", "Seven eight. Nine ten eleven twelve."]
    assert [each.text for each in passages_of("t", "One two three. Four five six. Seven.", words=5)] == [
        "One two three. Four five six."
    ]
