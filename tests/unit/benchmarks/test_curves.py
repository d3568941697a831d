"""The picture of an evaluation: which points make a line, and that it is the same bytes each time."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.lib.curves import draw, families
from ragserve.errors import InvalidRequest


def row(
    strategy: str, recomputed: float, f1: float, *, name: str = "crossdoc", kept: float = 100.0
) -> dict[str, Any]:
    return {
        "set": name,
        "strategy": strategy,
        "n": 500,
        "recomputed": recomputed,
        "f1": f1,
        "f1_vs_full_se": 1.5,
        "kept": kept,
    }


ROWS = [
    row("full", 100, 99),
    row("concat", 0, 54),
    row("epic:first=32", 20, 80),
    row("epic:first=16", 10, 70),
    row("concat:recompute=all", 100, 99),
    row("samkv:share=0.1,update=fusion", 9, 75, kept=15),
    row("samkv:share=0.1,update=overwrite", 9, 74, kept=15),
]


def test_numbers_vary_along_a_line_and_words_make_another() -> None:
    assert families(ROWS) == {
        "epic": [(0.0, 54.0, 1.5), (10.0, 70.0, 1.5), (20.0, 80.0, 1.5)],
        "samkv update=fusion": [(9.0, 75.0, 1.5)],
        "samkv update=overwrite": [(9.0, 74.0, 1.5)],
    }


def test_a_picture_has_a_panel_for_each_set_that_was_measured_and_never_changes() -> None:
    report = {
        "rows": [
            *ROWS,
            row("full", 100, 75, name="long_crossdoc"),
            row("epic:first=16", 1, 60, name="long_crossdoc"),
        ]
    }
    svg = draw(report)
    assert svg == draw(report)
    ElementTree.fromstring(svg)
    for text in (
        "crossdoc (500 questions)",
        "long_crossdoc (500 questions)",
        "samkv update=fusion",
        ">full<",
    ):
        assert text in svg
    assert "mid_crossdoc" not in svg


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(InvalidRequest, match="none of the sets"):
        draw({"rows": [row("full", 100, 99, name="onehop")]})
