"""Markers that point nowhere never reach a client, however the stream is cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.answering.citations import MarkerFilter

ALPHABET = st.sampled_from([*"ab [] \n\t0123456789.", "é", "٣"])


def run(text: str, n: int, cuts: list[int] | None = None) -> tuple[str, MarkerFilter]:
    markers = MarkerFilter(n)
    pieces, start = [], 0
    for cut in [*sorted(cuts or []), len(text)]:
        pieces.append(markers.feed(text[start:cut]))
        start = max(start, cut)
    return "".join(pieces) + markers.end(), markers


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Alan [1].", "Alan [1]."),
        ("Alan [9].", "Alan."),
        ("Alan [0] built", "Alan built"),
        ("[7] Alan", "Alan"),
        ("Alan[1][2][3][4]", "Alan[1][2][3]"),
        (" leading and trailing \n", "leading and trailing"),
        ("line\n[9] next", "line\n next"),
        ("in [2024] and a[1234]", "in [2024] and a[1234]"),
        ("[[9]1]", "[1]"),
        ("[[9]7]", ""),
        ("[1[9]", "[1"),
        ("open [1", "open [1"),
        ("a [] b [x] c", "a [] b [x] c"),
        ("[٣]", "[٣]"),
        ("", ""),
        ("   ", ""),
    ],
)
def test_markers_that_point_nowhere_go(text: str, clean: str) -> None:
    assert run(text, 3)[0] == clean


@given(
    text=st.text(ALPHABET, max_size=60), n=st.integers(0, 12), cuts=st.lists(st.integers(0, 60), max_size=8)
)
def test_the_cut_of_the_stream_does_not_matter(text: str, n: int, cuts: list[int]) -> None:
    whole, one = run(text, n)
    pieces, other = run(text, n, [cut for cut in cuts if cut <= len(text)])
    assert pieces == whole
    assert other.markers == one.markers


@given(text=st.text(ALPHABET, max_size=60), n=st.integers(0, 12))
def test_what_is_left_points_somewhere(text: str, n: int) -> None:
    clean, markers = run(text, n)
    assert clean == clean.strip()
    left = [(int(m[1]), m.start(), m.end()) for m in re.finditer(r"\[([0-9]{1,3})\]", clean)]
    assert [(m.index, m.start, m.end) for m in markers.markers] == left
    assert all(1 <= index <= n for index, _, _ in left)


def test_only_what_may_become_a_marker_is_held_back() -> None:
    markers = MarkerFilter(2)
    assert markers.feed("Alan") == "Alan"
    assert markers.feed(" ") == ""
    assert markers.feed("S") == " S"
    assert markers.feed("[") == ""
    assert markers.feed("1") == ""
    assert markers.feed("x") == "[1x"
    assert markers.feed(" [2") == ""
    assert markers.feed("]") == " [2]"
