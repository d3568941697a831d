"""Sentences over the end of a page, and the lines that pages repeat."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ragserve.ingest.chunking import Chunker
from ragserve.ingest.page_seams import sentence_end, sentences_over_pages
from ragserve.ingest.parsers.base import join_pages
from ragserve.ingest.parsers.pdf_furniture import without_furniture
from ragserve.ingest.tokenizer import Counter


def _leads(*pages: str) -> list[str]:
    return [lead for _, lead in sentences_over_pages(*join_pages(list(pages)))]


@pytest.mark.parametrize(
    ("before", "after", "lead"),
    [
        ("All is well. The reserve tank must be\nemptied before", "the ferry comes.",
         "The reserve tank must be emptied before "),
        ("Erst dann. Der Tank muss heute noch vor dem", "Sturm geleert werden.",
         "Der Tank muss heute noch vor dem "),
        ("Tank A\nTank B\nTank C", "Tank D", ""),
        ("Go now. This is the latest infor-", "mation that counts.", "This is the latest infor-"),
        ("已经检查。备用油箱必须在渡轮到达托伯莫里之前", "排空。", "备用油箱必须在渡轮到达托伯莫里之前"),
        ("The tank is full.", "the rest", ""),
        ("See the list:", "apples", ""),
        ("Annex A", "The tanks", ""),
        ("| a | b |\n|---|---|\n| the last of the cells |", "and more", ""),
        ("one two three four\n\n- apples", "pears", ""),
        ("x " * 500, "and more", ""),
    ],
)  # fmt: skip
def test_sentences_over_pages_are_found(before: str, after: str, lead: str) -> None:
    found = [each.rstrip() if not lead.endswith(" ") else each for each in _leads(before, after)]
    assert found == ([lead] if lead else [])


@pytest.mark.parametrize(
    "notes",
    ["1 See the rule book, clause 4.", "12 See the rule book,\nclause 4.\n13 The old one.", "* Not in May.",
     "† not in May", "¹ see the log\n² and the rules of 2004", "1The log."],
)  # fmt: skip
def test_footnotes_do_not_interrupt_a_sentence(notes: str) -> None:
    page = f"All is well. The reserve tank must be\nemptied before\n{notes}"
    assert _leads(page, "the ferry comes.") == ["The reserve tank must be emptied before "]
    assert _leads(page, "The ferry comes.")[:1] != ["The reserve tank must be emptied before "]


@pytest.mark.parametrize(
    ("before", "lead"),
    [
        # below a sentence that has ended, a date at the beginning of a line, lists, rows
        ("The reserve tank must be emptied before\n12 hours have passed since the",
         "The reserve tank must be emptied before 12 hours have passed since the "),
        ("The reserve tank must be emptied.\n1 See the log.\n2 See the rules.", ""),
        ("The engineer of the ferry empties\n* The reserve tank.\n* The tank below.", ""),
        ("The engineer of the ferry empties\n4 Tanks of oil.\n9 Tanks of water.", ""),
    ],
)  # fmt: skip
def test_lines_that_are_no_footnotes(before: str, lead: str) -> None:
    assert _leads(before, "the ferry comes.") == ([lead] if lead else [])


def test_a_page_without_text_between_ends_the_search() -> None:
    assert _leads("The tank must be emptied before", "", "the ferry comes.") == []


def test_the_end_of_a_sentence() -> None:
    text = "the ferry comes. All is well."
    assert text[: sentence_end(text, 0, len(text))] == "the ferry comes. "
    assert sentence_end("no end", 0, 6) == 6


@pytest.mark.parametrize("limit", [24, 64, 256])
def test_the_chunk_of_the_next_page_has_the_sentence_whole(limit: int, count: Counter) -> None:
    pages = [
        "Every tank is inspected in May by the engineer. The reserve tank must be emptied before",
        "the ferry reaches Tobermory. All other tanks stay full until the winter comes. " * 5,
        "The master signs the record.",
    ]
    text, starts = join_pages(pages)
    chunks = Chunker(count, limit).split(text, starts, running=True)
    first = next(chunk for chunk in chunks if chunk.page == 2)
    assert first.text.startswith("The reserve tank must be emptied before the ferry reaches Tobermory.")
    assert first.header_chars == len("The reserve tank must be emptied before ")
    assert all(chunk.text[chunk.header_chars :] == text[chunk.start : chunk.end] for chunk in chunks)
    assert [chunk.start for chunk in chunks] == [0, *(chunk.end for chunk, _ in pairwise(chunks))]
    assert all(count(chunk.text) == chunk.n_tokens <= limit for chunk in chunks)
    assert sum(chunk.header_chars > 0 for chunk in chunks) == 1
    assert not any(chunk.header_chars for chunk in Chunker(count, limit).split(text, starts))


def test_a_sentence_over_a_footnote_is_whole_in_a_chunk(count: Counter) -> None:
    pages = [
        "Every tank is inspected in May. The reserve tank must be emptied before¹\n1 See the rule book.",
        "the ferry reaches Tobermory. All other tanks stay full.",
    ]
    text, starts = join_pages(pages)
    first, second = Chunker(count, 64).split(text, starts, running=True)
    assert second.text.startswith("The reserve tank must be emptied before¹ the ferry reaches Tobermory.")
    assert (first.page, second.page) == (1, 2)
    assert second.header_chars
    assert "1 See the rule book." in first.text
    assert "rule book" not in second.text


def _pages(n: int, form: str) -> list[str]:
    return [form.format(n=number, n7=number * 7, all=n) for number in range(1, n + 1)]


def test_heads_stay_once_and_page_numbers_nowhere() -> None:
    pages = _pages(4, "HARBOUR RULES\nThe text {n7} is here.\nIt goes {n7} on\nRev 3\nPage {n} of {all}")
    assert without_furniture(pages) == [
        "HARBOUR RULES\nThe text 7 is here.\nIt goes 7 on",
        *(f"The text {n}4 is here.\nIt goes {n}4 on".replace(f"{n}4", str(7 * (n + 1))) for n in (1, 2)),
        "The text 28 is here.\nIt goes 28 on\nRev 3",
    ]
    assert without_furniture(["A table\n1", "B table\n2"]) == ["A table\n1", "B table\n2"]
    for form in (
        "Words {n7}.\n{n}",
        "Words {n7}.\n- {n} -",
        "Seite {n}\nWords {n7}.",
        "Words {n7}.\n{n}/{all}",
    ):
        assert without_furniture(_pages(4, form)) == [f"Words {7 * n}." for n in range(1, 5)]
    assert without_furniture(_pages(2, "Words {n7}.\nPage {n} of {all}")) == ["Words 7.", "Words 14."]
    assert without_furniture(_pages(4, "Words {n7}.\nRules | Page {n}"))[:3] == [
        "Words 7.",
        "Words 14.",
        "Words 21.",
    ]


_ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x", "xi", "xii")


@pytest.mark.parametrize(
    "form",
    ["{body}\n{roman}", "{roman}\n{body}", "{body}\n- {roman} -", "{body}\nPage {roman} of xii",
     "{body}\n{capitals}", "Seite {capitals}\n{body}"],
)  # fmt: skip
def test_roman_page_numbers_are_left_out(form: str) -> None:
    bodies = [f"Words {7 * at}." for at in range(1, 13)]
    pages = [
        form.format(body=body, roman=roman, capitals=roman.upper())
        for body, roman in zip(bodies, _ROMAN, strict=True)
    ]
    assert without_furniture(pages) == bodies
    # behind a cover, and before a book with numbers of its own
    book = ["The cover.", *pages[:4], *(f"Text {7 * at}.\n{at}" for at in range(1, 30))]
    assert without_furniture(book) == [
        "The cover.",
        *bodies[:4],
        *(f"Text {7 * at}." for at in range(1, 30)),
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ("I", "C", "I", "V"),  # they do not count
        ("I", "I", "I", "I"),
        ("i", "ii", "x", "c"),  # too few that do
        ("Vi", "Vii", "Viii", "Ix"),
        ("iiii", "iiiii", "vv", "lc"),
    ],
)
def test_letters_that_are_no_page_numbers_stay(lines: tuple[str, ...]) -> None:
    pages = [f"Words {7 * at}.\n{line}" for at, line in enumerate(lines, 1)]
    shown = "\n".join(without_furniture(pages)).split("\n")
    assert [line for line in dict.fromkeys(lines) if line not in shown] == []


def test_roman_numbers_of_sections_stay_at_the_head_of_pages() -> None:
    pages = [f"{roman.upper()}\nWords {at * 7}." for at, roman in enumerate(_ROMAN)]
    assert without_furniture(pages) == pages


@pytest.mark.parametrize(
    "form",
    ["Sales in month {n}\nTotal: {n7}", "Chapter {n}\nText {n7}.", "Text {n7}.\nTotal: {n7}", "Text {n7}"],
)
def test_lines_that_differ_stay(form: str) -> None:
    assert without_furniture(_pages(5, form)) == _pages(5, form)
