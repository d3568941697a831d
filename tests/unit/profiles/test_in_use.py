"""The running estimate of what strategies lose in use: when one is taken out, and what survives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragserve.profiles.in_use import LATEST, InUse, InUseRecord, clear


def estimate(*answers: tuple[float, float]) -> InUse:
    found = InUse("float32")
    for kl, lost in answers:
        found = found.with_answer(kl, lost)
    return found


def record(place: Path, *, dtype: str = "float32") -> InUseRecord:
    return InUseRecord(place, "abc", dtype=dtype, samkv="")


def test_good_answers_never_take_a_strategy_out() -> None:
    for count in (1, 2, 20, 200):
        assert not estimate(*[(0.001, 0.0)] * count).out
    assert not estimate(*[(0.0, 0.0)] * 50, (2.0, 1.0)).out, "one that is lost among many"


@pytest.mark.parametrize("answer", [(0.2, 0.0), (0.0, 0.5)], ids=["kl", "regret"])
def test_one_bad_answer_takes_nothing_out_and_a_handful_does(answer: tuple[float, float]) -> None:
    assert not estimate(answer).out
    found = estimate(*[answer] * 6)
    assert found.out
    assert found.with_answer(0.0, 0.0).out, "until it is cleared"


def test_figures_by_hand() -> None:
    # 0.1, 0.3 and the one that loses nothing: mean 0.1333, standard error 0.0882; t of 2 degrees is 2.92
    found = estimate((0.1, 0.0), (0.3, 0.25)).figures
    assert (found["compared"], found["kl"], found["regret"]) == (2, 0.2, 12.5)
    assert found["kl_at_least"] == 0.0
    many = estimate(*[(0.1, 0.0), (0.3, 0.25)] * 40).figures
    assert 0.15 < many["kl_at_least"] < 0.2 < many["kl_at_most"] < 0.25
    assert many["regret_at_least"] < 12.5 < many["regret_at_most"]


def test_only_the_latest_answers_count() -> None:
    found = estimate(*[(0.5, 0.0)] * 3, *[(0.0, 0.0)] * LATEST)
    assert (len(found.kls), found.compared, found.figures["kl"]) == (LATEST, LATEST + 3, 0.0)


def test_what_was_taken_out_stays_out_for_its_namespace_until_it_is_cleared(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    first = record(place)
    for _ in range(6):
        first.add("a", "concat", 0.2, 0.5, existing={"a", "b"})
    first.add("b", "concat", 0.0, 0.0, existing={"a", "b"})
    again = record(place)
    assert (again.taken_out("a"), again.taken_out("b")) == ({"concat"}, set())
    assert record(place, dtype="bfloat16").taken_out("a") == set(), "another precision"
    clear(place, "abc", "a", ["concat"])
    assert first.taken_out("a") == again.taken_out("a") == set(), "without a restart"
    assert again.entries()["b"]["concat"].compared == 1


def test_namespaces_that_are_gone_leave_nothing(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    found = record(place)
    found.add("a", "concat", 0.0, 0.0, existing={"a"})
    found.add("b", "concat", 0.0, 0.0, existing={"b"})
    assert list(json.loads(place.read_text())["models"]["abc"]) == ["b"]


def test_a_file_that_is_none_takes_nothing_out(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    place.write_text("[]")
    assert record(place).taken_out("a") == set()
    clear(tmp_path / "missing.json", "abc", "a", ["concat"])
    assert not (tmp_path / "missing.json").exists()
