"""Which passages an answer's sentences are attributed to, and which sentences have none."""

from __future__ import annotations

import time

import pytest

from ragserve.answering.citations import MarkerFilter
from ragserve.answering.support import attribute

LIGHTS = [
    (
        "Skerryvore",
        "The lighthouse of Skerryvore was built by Alan Stevenson and lit in 1844. It is 48 metres tall.",
    ),
    (
        "Bell Rock",
        "Robert Stevenson built the lighthouse of Bell Rock. It was lit in 1810 and is 35 metres tall.",
    ),
    ("Muckle Flugga", "Muckle Flugga was lit in 1854. Thomas and David Stevenson built it."),
    ("Soup", "Leeks, potatoes and cream are for the soup. Stir it for 48 minutes."),
]
WHO = "Who built the lighthouse of Skerryvore?"


def found(
    answer: str, question: str = WHO, passages: list[tuple[str, str]] = LIGHTS
) -> list[tuple[list[int], str]]:
    """The passages and basis of each sentence; the basis is 'none' where nothing supports it."""
    markers = MarkerFilter(len(passages))
    text = markers.feed(answer) + markers.end()
    each = attribute(text, markers.markers, question, passages)
    assert all(one.supported == bool(one.passages) for one in each if one.basis != "marker")
    return [(list(one.passages), one.basis or "none") for one in each]


@pytest.mark.parametrize(
    ("answer", "passages", "basis"),
    [
        ("Alan Stevenson", [1], "quote"),
        ("It was built by Alan Stevenson.", [1], "words"),
        ("alan stevenson.", [1], "quote"),
        ("Bob Marley", [], "none"),
        ("", [], ""),
    ],
)
def test_a_sentence_has_the_passages_that_support_it(answer: str, passages: list[int], basis: str) -> None:
    assert found(answer) == ([(passages, basis)] if answer else [])


def test_a_short_answer_is_judged_with_the_question() -> None:
    assert found("48", "How tall is the lighthouse of Skerryvore?") == [([1], "quote")]
    assert found("48", "How many minutes is the soup to be stirred?") == [([4], "quote")]


def test_numbers_must_be_there() -> None:
    assert found("It was built by Alan Stevenson and lit in 1844.") == [([1], "words")]
    assert found("It was built by Alan Stevenson and lit in 1845.") == [([], "none")]


def test_each_sentence_has_its_own() -> None:
    answer = (
        "Alan Stevenson built Skerryvore. Robert Stevenson built Bell Rock. Both tickets cost 17 dollars."
    )
    assert [passages for passages, _ in found(answer, "Who built which lighthouse?")] == [[1], [2], []]


def test_two_passages_support_a_comparison_together() -> None:
    both = "Skerryvore, lit in 1844, is younger than Bell Rock, lit in 1810."
    assert found(both, "Which lighthouse is younger, Skerryvore or Bell Rock?") == [([1, 2], "words")]


def test_the_passage_that_leads_to_the_answer_is_cited_with_it() -> None:
    passages = [
        (
            "Mountrail County Courthouse",
            "The courthouse in Stanley, North Dakota served Mountrail County as seat.",
        ),
        ("Van Hook Township", "Van Hook Township is a township in Mountrail County in North Dakota."),
        ("Port Blair", "Port Blair is the capital of the Andaman Islands, and the seat of the district."),
    ]
    question = "What is the seat of the county where Van Hook Township is located?"
    assert found("Stanley", question, passages) == [([1, 2], "quote")]


SONGS = [
    ("Low Tide", "Low Tide is a song by Ann Ferrer, released in 1987."),
    ("Ann Ferrer", "Ann Ferrer was born in Tobermory and sings."),
    ("High Tide", "High Tide is a song by Moira Kells, who was born in Oban."),
    ("Ferrers", "The Ferrers are a family of millers. One was born in Salen."),
]


def test_passages_are_joined_by_titles_and_by_names_of_two_words() -> None:
    question = "Where was the singer of Low Tide born?"
    assert found("Tobermory", question, SONGS) == [([1, 2], "quote")]
    untitled = [("Low Tide", SONGS[0][1]), ("Singers", SONGS[1][1]), *SONGS[2:]]
    assert found("Tobermory", question, untitled) == [([1, 2], "quote")]


def test_one_passage_that_answers_alone_is_cited_alone() -> None:
    assert found("Oban", "Where was Moira Kells born?", SONGS) == [([3], "quote")]
    assert found("1987", "When was Low Tide released?", SONGS) == [([1], "quote")]


def test_of_equal_passages_one_is_cited() -> None:
    twice = [*LIGHTS, ("Skerryvore Light", LIGHTS[0][1])]
    assert found("Alan Stevenson", passages=twice) == [([1], "quote")]


@pytest.mark.parametrize("answer", ["Yes", "no.", "No"])
def test_yes_and_no_cite_what_the_question_is_about(answer: str) -> None:
    assert found(answer, "Are Skerryvore and Bell Rock lighthouses?") == [([1, 2], "words")]
    assert found(answer, "Does the ferry to Coll carry bicycles?") == [([], "none")]


def test_what_names_its_passages_is_believed_but_checked() -> None:
    markers = MarkerFilter(4)
    text = markers.feed("Alan Stevenson built it [1]. The ticket costs 17 dollars [2]. It was lit in 1844.")
    each = attribute(text + markers.end(), markers.markers, WHO, LIGHTS)
    assert [(one.passages, one.basis, one.supported) for one in each] == [
        ((1,), "marker", True),
        ((2,), "marker", False),
        ((1,), "words", True),
    ]


def test_without_passages_nothing_is_cited() -> None:
    assert found("Alan Stevenson", passages=[]) == [([], "none")]


def test_other_scripts_are_attributed() -> None:
    passages = [("灯塔", "斯克里沃尔灯塔由艾伦·史蒂文森建造。"), ("汤", "汤里有土豆和奶油。")]
    assert found("艾伦·史蒂文森", "谁建造了斯克里沃尔灯塔？", passages) == [([1], "words")]
    passages = [("ประภาคาร", "ประภาคารสร้างโดยอลัน สตีเวนสัน ใช้ไฟฟ้า"), ("ซุป", "ซุปมีมันฝรั่งและครีม")]
    assert found("ไฟฟ้า", "ประภาคารใช้อะไร", passages) == [([1], "words")]


def test_long_contexts_take_no_seconds() -> None:
    passages = [(title, f"{text} " * 50) for title, text in LIGHTS * 16]
    started = time.thread_time()
    found("Alan Stevenson built Skerryvore. " * 40, passages=passages)
    assert time.thread_time() - started < 30
