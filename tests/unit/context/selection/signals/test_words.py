"""Signal `words`: whole words of any case, with and without diacritics, against sets written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.context.selection.signals.terms import words_of
from sglang_ext.context.selection.signals.words import words
from tests.unit.context.selection.signals.evidence import evidence_of

WORDS = ["Nobel", "nobel", "PRIZE", "prizes", "Gödel", "godel", "in", "1921", "東京", "was"]
FORMS = ["nobel", "nobel", "prize", "prizes", "godel", "godel", "in", "1921", None, "was"]
sentence_of_words = st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=6)


def terms(numbers: Sequence[int]) -> set[object]:
    written = [form for n in numbers for form in (["東", "京"] if FORMS[n] is None else [FORMS[n]])]
    return {*written, *(pair for pair in pairwise(written) if set(pair) <= {"東", "京"})}


@given(
    st.lists(st.lists(sentence_of_words, min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, len(WORDS) - 1), max_size=6),
)
def test_terms_count_by_how_rare_they_are(documents: list[list[list[int]]], question: list[int]) -> None:
    found = words(
        evidence_of(
            [[" ".join(WORDS[n] for n in text) + ". " for text in document] for document in documents],
            " ".join(WORDS[n] for n in question) + "?",
        )
    )
    texts = [terms(text) for document in documents for text in document]
    asked = terms(question)
    held = {term: sum(term in text for text in texts) for term in asked}
    score = [sum(math.log(len(texts) / held[term]) for term in asked & text) for text in texts]
    top = max(*score, 1e-9)
    assert found.tolist() == pytest.approx([each / top for each in score], abs=1e-4)


@pytest.mark.parametrize(
    "question", ["who won the nobel prize", "WHO WON THE NOBEL PRIZE", "Who won the Nobel prizes?"]
)
def test_case_and_ending_make_no_difference(question: str) -> None:
    found = words(evidence_of([["It rained. ", "The Nobel Prize went to her. "], ["He slept. "]], question))
    assert found.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Émile Zola's NOVELS", ["emile", "zola", "s", "novels"]),
        ("naïve coöperation", ["naive", "cooper"]),
        ("directed director directing", ["direct"] * 3),
        ("Straße STRASSE", ["strass", "strass"]),
        ("любовью Любовь", ["любовь", "любовь"]),
        ("東京タワー2024年", ["東", "京", "タ", "ワ", "ー", "2024", "年"]),
        ("ß_a-b", ["ss", "a", "b"]),
        ("", []),
        (" .,;\n", []),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words_of(text) == found


def test_a_question_without_words_says_nothing() -> None:
    assert words(evidence_of([["One. ", "Two. "]], "?!")).tolist() == [0.0, 0.0]
