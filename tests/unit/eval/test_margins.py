"""The recovered margin, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.eval.margins import margins


def answers(name: str, **f1: list[float]) -> list[dict[str, Any]]:
    """Rows of a set: of each strategy, the F1 of its questions."""
    return [
        {"set": name, "id": str(number), "strategy": strategy, "f1": value}
        for strategy, values in f1.items()
        for number, value in enumerate(values)
    ]


def test_margins_are_pooled_over_the_sets_on_which_reuse_loses_enough() -> None:
    rows = answers("a", full=[1, 1], concat=[0, 0.5], epic=[1, 0.5])  # 1 of 1.5 recovered
    rows += answers("b", full=[1], concat=[0.5], epic=[0.25])  # -0.25 of 0.5
    rows += answers("c", full=[0.54], concat=[0.5], epic=[1])  # 4 points: too few to divide by
    found = margins(rows)
    assert found["epic"]["margin"] == pytest.approx(100 * 0.75 / 2.0)
    assert found["epic"]["margin_sets"] == 2
    assert (found["full"]["margin"], found["concat"]["margin"]) == (100.0, 0.0)
    assert found["full"]["margin_95"] == [100.0, 100.0]


def test_a_strategy_is_compared_on_the_questions_that_it_answered() -> None:
    rows = answers("a", full=[1, 1, 1], concat=[0, 0, 0], epic=[1, 0])
    assert margins(rows)["epic"]["margin"] == 50.0


def test_the_interval_is_that_of_paired_questions() -> None:
    rows = answers("a", full=[1.0] * 400, concat=[0.0] * 400, epic=[1.0, 0.0] * 200)
    low, high = margins(rows)["epic"]["margin_95"]
    assert low == pytest.approx(50 - 4.9, abs=0.6)  # 1.96 * 50 / sqrt(400)
    assert high == pytest.approx(50 + 4.9, abs=0.6)
    assert margins(rows) == margins(rows)


def test_without_full_or_plain_reuse_there_is_no_margin() -> None:
    assert margins(answers("a", full=[1.0], epic=[1.0])) == {}
    assert margins(answers("a", concat=[1.0], epic=[1.0])) == {}
    assert margins(answers("a", full=[0.5], concat=[0.5], epic=[1.0])) == {}
