"""SQuAD's exact match and F1, against values worked out by hand."""

from __future__ import annotations

import pytest

from ragserve.verification.metrics import (
    contains_answer,
    count_words,
    exact_match,
    is_refusal,
    normalise,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat.", "cat"),
        ("a theatre, an anthem", "theatre anthem"),
        ("U.S.A.", "usa"),
        ("  1,234\n", "1234"),
        ("Été – à Paris", "été à paris"),
        ("“Oslo”, l’été…", "oslo lété"),
        ("挪威的首都是奥斯陆。", "挪 威 的 首 都 是 奥 斯 陆"),
        ("Windows、Linux（２０２０年）", "windows linux 2020 年"),
        ("ไฟฟ้า", "ไ ฟ ฟ ้ า"),
        ("नॉर्वे की राजधानी।", "नॉर्वे की राजधानी"),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_exact_match_takes_the_best_answer() -> None:
    assert exact_match(" the Dou Systems.", ["Springer Museum", "Dou Systems"]) == 1.0
    assert exact_match("Dou", ["Dou Systems"]) == 0.0


def test_f1_by_hand() -> None:
    # predicted {brown, fox}, wanted {quick, brown, fox}: precision 1, recall 2/3
    assert token_f1("the brown fox", ["quick brown fox"]) == pytest.approx(0.8)
    # a repeated word counts once: precision 1/2, recall 1
    assert token_f1("fox fox", ["fox"]) == pytest.approx(2 / 3)
    assert token_f1("cat", ["dog"]) == 0.0
    assert token_f1("", ["dog"]) == 0.0
    assert token_f1("the", ["a"]) == 1.0  # nothing left on either side
    assert token_f1("cat", ["dog", "cat"]) == 1.0


def test_scripts_that_do_not_separate_words() -> None:
    assert contains_answer("挪威的首都是奥斯陆。", ["奥斯陆"])
    assert contains_answer("灯塔于1844年首次点亮", ["1844"])
    assert not contains_answer("挪威的首都是奥斯陆。", ["斯德哥尔摩"])
    assert exact_match("奥斯陆。", ["奥斯陆"]) == 1.0
    assert token_f1("是奥斯陆。", ["奥斯陆"]) == pytest.approx(6 / 7)
    assert exact_match("“Oslo”", ["Oslo"]) == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [("The – old harbour.", 3), ("挪威的首都，奥斯陆。", 4), ("iPhone15的电池 lasts", 4), ("。 –", 0)],
)
def test_words_are_counted(text: str, words: int) -> None:
    """Two characters of a script that does not separate words are about one."""
    assert count_words(text) == words


def test_contains_answer_wants_whole_words() -> None:
    assert contains_answer("It stands in Westert, by the river.", ["westert"])
    assert not contains_answer("It stands in Westertown.", ["Westert"])
    assert not contains_answer("anything", ["the"])  # nothing left of the answer


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("", True),
        ("Unknown.", True),
        ("Unknown Pleasures", False),
        ("Not mentioned", True),
        ("The documents don't mention it.", True),
        ("I'm sorry, I don't know", True),
        ("It is not explicitly stated in the text", True),
        ("The answer cannot be found.", True),
        ("Never Say Never Again", False),
        ("Notting Hill", False),
    ],
)
def test_refusals(text: str, refuses: bool) -> None:
    assert is_refusal(text, ["USA Network"]) is refuses
    assert not is_refusal(text or "x", [text or "x"]), "what is an accepted answer is none"
