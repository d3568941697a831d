"""The number of passages that probes would choose, beside that of labels."""

from __future__ import annotations

from typing import Any

from benchmarks.verdicts_without_labels import chosen_k


def row(count: int, probes: float | None, labelled: float | None) -> dict[str, Any]:
    gains = {"probes: vs_full": probes, "labelled: vs_full": labelled}
    return {"strategy": f"passages:by=score,count={count}", **gains}


def test_all_passages_are_a_choice_too() -> None:
    found = chosen_k("s", [row(3, -1.0, -4.0), row(5, 1.0, -3.5), row(10, None, None)])
    assert found == {"set": "s", "k by probes": 5, "k by labels": "all", "loses": 3.5}
