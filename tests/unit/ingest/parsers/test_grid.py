"""Tables with spans, and the marks of raised, lowered and struck-out text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.ingest.parsers.grid import Grid
from ragserve.ingest.parsers.small_text import lowered, raised, struck


def test_spans_leave_blanks() -> None:
    grid = Grid()
    grid.add(0, "Boat", rowspan=2)
    grid.add(0, "week", colspan=2)
    grid.add(1, "day")
    grid.add(1, "night")
    grid.add(2, "Argo")
    grid.add(2, "1")
    assert grid.rows() == [["Boat", "week", ""], ["", "day", "night"], ["Argo", "1", ""]]


def test_a_table_that_claims_to_be_endless_costs_nothing() -> None:
    grid = Grid()
    grid.add(0, "a", rowspan=10**9, colspan=10**9)
    grid.add(1, "b")
    assert len(grid.rows()) == 2


@given(st.lists(st.lists(st.text("ab", max_size=2), min_size=3, max_size=3), max_size=5))
def test_a_table_without_spans_is_itself(table: list[list[str]]) -> None:
    grid = Grid()
    for number, row in enumerate(table):
        for cell in row:
            grid.add(number, cell)
    assert grid.rows() == table


@pytest.mark.parametrize(
    ("text", "mark", "shown"),
    [
        ("6", raised, "^6"),
        (" -3 ", raised, " ^-3 "),
        ("n + 1", raised, "^(n + 1)"),
        ("st", raised, "st"),
        ("i", lowered, "_i"),
        (" ", lowered, " "),
        ("90 EUR", struck, "~~90 EUR~~"),
    ],
)
def test_marks(text: str, mark, shown: str) -> None:  # type: ignore[no-untyped-def]
    assert mark(text) == shown
