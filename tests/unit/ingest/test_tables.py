"""Tables that are longer than a chunk keep their header, and citations keep their place."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve.ingest.chunking import Chunker
from ragserve.ingest.markdown_tables import markdown_table, tables_in, with_records
from ragserve.ingest.tokenizer import Counter

HEADER = "| city | river | people |\n|---|---|---|\n"


@pytest.fixture(scope="session")
def chunker(count: Counter) -> Chunker:
    return Chunker(count, 64)


def check(text: str, chunker: Chunker, count: Counter, limit: int = 64) -> None:
    """The chunks are the text in order; in front, some have a header that was there before."""
    chunks = chunker.split(text)
    own = [chunk.text[chunk.header_chars :] for chunk in chunks]
    assert "".join(own) == text
    assert own == [text[chunk.start : chunk.end] for chunk in chunks]
    for chunk in chunks:
        assert chunk.text[: chunk.header_chars] in text[: chunk.start]
        assert chunk.n_tokens == count(chunk.text) <= limit


def test_every_chunk_of_a_long_table_begins_with_its_header(chunker: Chunker, count: Counter) -> None:
    rows = "".join(f"| Town {n} | River {n % 7} | {n * 317} |\n" for n in range(60))
    text = f"Towns of the coast.\n\n{HEADER}{rows}\nWhat follows the table is prose again."
    check(text, chunker, count)
    chunks = chunker.split(text)
    within = [chunk for chunk in chunks if "| Town" in chunk.text]
    assert len(within) > 5
    assert all(HEADER in chunk.text for chunk in within)
    assert all(chunk.text.startswith(HEADER) for chunk in within[1:])
    assert all(line.count("|") in (0, 4) for chunk in chunks for line in chunk.text.split("\n")), "whole rows"
    after = [chunk for chunk in chunks if chunk.start > text.index("What follows")]
    assert all(chunk.header_chars == 0 for chunk in after)


def test_two_tables_do_not_share_a_header(chunker: Chunker, count: Counter) -> None:
    other = "| ship | tons |\n|---|---|\n"
    first = "".join(f"| Town {n} | River | {n} |\n" for n in range(20))
    second = "".join(f"| Ship {n} | {n} |\n" for n in range(20))
    text = f"{HEADER}{first}\n{other}{second}"
    check(text, chunker, count)
    for chunk in chunker.split(text):
        assert ("Town" in chunk.text) <= (HEADER in chunk.text)
        assert ("Ship" in chunk.text) <= (other in chunk.text)


def test_a_row_longer_than_a_chunk_keeps_the_header_in_its_parts(chunker: Chunker, count: Counter) -> None:
    text = f"{HEADER}| Rome | {'a long story ' * 60}| 3 |\n| Oslo | none | 1 |\n"
    check(text, chunker, count)
    chunks = chunker.split(text)
    assert all(chunk.text.startswith(HEADER) for chunk in chunks)
    assert len(chunks) > 3


def test_a_header_of_more_than_half_a_chunk_is_not_repeated(chunker: Chunker, count: Counter) -> None:
    names = " | ".join(f"column {n}" for n in range(40))
    text = f"| {names} |\n|{'---|' * 40}\n" + "".join(f"| {' | '.join('12345' * 8)} |\n" for _ in range(3))
    check(text, chunker, count)
    assert not any(chunk.header_chars for chunk in chunker.split(text))


def test_a_table_of_very_many_columns_in_markdown_becomes_records() -> None:
    names, values = [f"sensor {n}" for n in range(60)], [str(n * 7) for n in range(60)]
    wide = f"| {' | '.join(names)} |\n|{'---|' * 60}\n| {' | '.join(values)} |\n"
    text = with_records(f"Above.\n\n{wide}\n{HEADER}| Oslo | none | 1 |\n\nBelow.")
    assert text.startswith("Above.\n\nsensor 0: 0; sensor 1: 7; ")
    assert "sensor 59: 413\n\n| city | river |" in text
    assert text.endswith("\n\nBelow.")
    assert all(len(line) < 400 for line in text.split("\n"))


def test_a_table_ends_with_its_page(chunker: Chunker) -> None:
    rows = "".join(f"| Town {n} | River | {n} |\n" for n in range(20))
    page = f"{HEADER}{rows}"
    chunks = chunker.split(page + "| no | table | here |\n", [(0, 1), (len(page), 2)])
    assert [chunk.header_chars > 0 for chunk in chunks if chunk.page == 2] == [False]


LINES = st.sampled_from(
    [
        "| a | b |",
        "|---|---|",
        "| - |",
        "a | b",
        "---",
        "|",
        "| x \\| y | z |",
        "",
        "prose",
        "| " + "long " * 90 + "| b |",
    ]
)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(LINES, min_size=1, max_size=30), end=st.sampled_from(["\n", "\r\n"]))
def test_whatever_looks_like_a_table_is_cut_without_loss(
    lines: list[str], end: str, chunker: Chunker, count: Counter
) -> None:
    text = end.join(lines)
    if text.strip():
        check(text, chunker, count)


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("a | b\n--- | ---\n1 | 2\n\nend", ["a | b\n--- | ---\n1 | 2\n\n"]),
        ("| a |\n|:-:|\n| 1 |", ["| a |\n|:-:|\n| 1 |"]),
        ("| a | b |\r\n|---|---|\r\n| 1 | 2 |\r\n", ["| a | b |\r\n|---|---|\r\n| 1 | 2 |\r\n"]),
        ("Heading\n---\n\ntext", []),
        ("| a | b |\n|---|\n| 1 | 2 |", []),
        ("---\ntitle: x\n---\n", []),
        ("|---|---|\n| 1 | 2 |", []),
    ],
    ids=["bare", "one-column", "crlf", "setext", "widths-differ", "front-matter", "no-header"],
)
def test_markdown_tables_are_recognised(text: str, tables: list[str]) -> None:
    assert [text[found.start : found.end] for found in tables_in(text, 0, len(text))] == tables


def test_cells_cannot_break_a_row() -> None:
    rows = [["a|b", "c\nd", ""], ["", "", ""], ["1", "2", ""]]
    assert markdown_table(rows) == "| a\\|b | c d |\n|---|---|\n| 1 | 2 |"
    assert markdown_table([]) == markdown_table([["", ""]]) == ""
