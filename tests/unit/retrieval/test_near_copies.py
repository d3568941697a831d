"""Near copies are found by shared word triples, whatever their case and punctuation."""

from __future__ import annotations

from ragserve.retrieval.near_copies import without_copies

TEXT = "The lighthouse of Skerryvore was built by Alan Stevenson between 1838 and 1844 on a reef."


def test_the_first_of_near_copies_stays() -> None:
    nearly = TEXT.upper().replace("1844", "1845")
    other = "The lighthouse of Bell Rock was built by Robert Stevenson between 1807 and 1810 on a reef."
    assert without_copies([TEXT, other, nearly, TEXT], 1) == [0, 1, 2]
    assert without_copies([TEXT, other, nearly, TEXT], 0.6) == [0, 1]
    assert without_copies([nearly, TEXT], 0.6) == [0]
    assert without_copies(["", "A word", "a WORD!", "another word"], 0.8) == [0, 1, 3]
    assert without_copies([], 0.8) == []
