"""In which order passages are taken: by the search, the question's words, and what those before them name."""

from __future__ import annotations

import pytest

from ragserve.linked_passages import linked, read_words

QUESTION = "When was the director of the film Grey Harbour born?"
FILM = ("Grey Harbour (film)", "Grey Harbour is a film directed by Mira Valdeno. It was shot at sea.")
OTHERS = [
    ("Red Harbour", "Red Harbour is a film of 1961, and its director was born in the north."),
    ("Grey Owl", "Grey Owl is a film by a director who was born in the year of the flood."),
    ("Harbour", "A harbour is a place where ships are safe. The film industry uses harbours, too."),
    ("Tin", "Tin is a metal of low hardness, and was mined in the hills above the village."),
]
DIRECTOR = ("Mira Valdeno", "She came into the world on 3 May 1912, a child of farmers.")
COUSIN = ("Biography", "Valdeno, who made her first pictures at sea, was a child of farmers.")


def test_the_second_step_of_a_question_is_what_the_first_one_names() -> None:
    passages = [FILM, *OTHERS, DIRECTOR]
    scores = [0.6, 0.5, 0.45, 0.4, 0.1, 0.3]
    assert linked(QUESTION, passages, scores).order[:2] == [0, 5]
    assert linked(QUESTION, passages, scores, names=0.0).order[:2] == [0, 5], "by its title alone"
    assert linked(QUESTION, passages, scores, titles=0.0, names=0.0).order[:2] == [0, 1]


def test_a_title_that_a_later_passage_names_is_a_link_too() -> None:
    passages = [DIRECTOR, *OTHERS, ("Notes", "a text on mira valdeno and the sea")]
    scores = [0.6, 0.5, 0.45, 0.4, 0.1, 0.3]
    assert linked("Who was that child of farmers?", passages, scores, names=0.0).order[:2] == [0, 5]


def test_names_that_the_question_lacks_are_a_link() -> None:
    passages = [FILM, *OTHERS, COUSIN]
    scores = [0.6, 0.5, 0.45, 0.4, 0.1, 0.3]
    assert linked(QUESTION, passages, scores, titles=0.0).order[:2] == [0, 5]


def test_passages_of_one_document_lend_each_other_nothing() -> None:
    """Else a long document that names itself would fill every budget."""
    more = (FILM[0], "Mira Valdeno and the crew of Grey Harbour went home.")
    passages = [FILM, *OTHERS, more, DIRECTOR]
    scores = [0.6, 0.5, 0.45, 0.4, 0.1, 0.3, 0.3]
    assert linked(QUESTION, passages, scores).order[:2] == [0, 6]


def test_without_scores_the_places_count() -> None:
    passages = [OTHERS[3], FILM, *OTHERS[:3], DIRECTOR]
    assert linked(QUESTION, passages).order[:3] == linked(QUESTION, passages, [None] * 6).order[:3]
    assert linked("metals?", [OTHERS[3], *OTHERS[:3]]).order[0] == 0


def test_scripts_without_spaces_have_words() -> None:
    passages = [
        ("港", "灰色港口是一部电影。导演是米拉瓦尔。"),
        ("锡", "锡是一种金属。村庄在山上。"),
        ("船", "船在海上。电影很长。"),
        ("米拉瓦尔", "她出生于五月。"),
    ]
    assert linked("灰色港口的导演何时出生？", passages, [0.5, 0.4, 0.4, 0.0]).order[:2] == [0, 3]


def test_scores_say_how_far_each_stood_out() -> None:
    ranking = linked(QUESTION, [FILM, *OTHERS, DIRECTOR], [0.6, 0.5, 0.45, 0.4, 0.1, 0.3])
    assert sorted(ranking.order) == list(range(6))
    assert ranking.scores[1] > 2 * max(ranking.scores[2:])


@pytest.mark.parametrize("passages", [[], [("", "")], [("", "")] * 3, [("Same", "same text")] * 3])
def test_passages_that_say_nothing_stay_in_order(passages: list[tuple[str, str]]) -> None:
    assert linked("", passages).order == list(range(len(passages)))


def test_only_texts_of_usual_length_are_remembered() -> None:
    usual, long = "The lamp is lit. " * 100, "The lamp is lit. " * 1000
    assert read_words(usual) is read_words("".join(usual))
    assert read_words(long) is not read_words(long)
    assert read_words(long).terms == read_words(usual).terms * 10
    assert read_words("x" * 1000).terms == read_words("x" * 1001).terms
