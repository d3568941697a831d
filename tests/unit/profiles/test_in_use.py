"""How often answers in use differ from full prefill's: when a strategy is taken out, and what survives."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ragserve.profiles import in_use
from ragserve.profiles.in_use import InUse, InUseRecord, RecordedRates, recorded_rate

TENTH = RecordedRates((0.1, 350))


def after(*answers: bool, recorded: tuple[float, int] | None = (0.1, 350)) -> InUse:
    found = InUse("float32")
    for different in answers:
        found = found.with_answer(different, recorded=RecordedRates(recorded))
    return found


def record(place: Path, *, dtype: str = "float32") -> InUseRecord:
    return InUseRecord(place, "abc", dtype=dtype, samkv="")


def test_answers_at_the_recorded_rate_take_nothing_out() -> None:
    every_tenth = [number % 10 == 0 for number in range(2000)]
    found = after(*every_tenth)
    assert not found.out
    assert (found.compared, found.figures["different"]) == (2000, 10.0)
    assert found.figures["recorded"] == pytest.approx(11.0, abs=0.1), "it is an estimate"
    assert not after(*[False] * 200, True, True, True).out, "three that differ among many"


@pytest.mark.parametrize(("rate", "within"), [(1.0, 12), (0.5, 40), (0.25, 200)])
def test_a_higher_rate_takes_a_strategy_out(rate: float, within: int) -> None:
    draw = random.Random(0)
    found = after(*[number % 10 == 0 for number in range(500)])
    for _ in range(within):
        found = found.with_answer(draw.random() < rate, recorded=TENTH)
    assert found.out
    assert found.with_answer(False, recorded=TENTH).out, "until it is cleared"


def test_unsupported_answers_take_a_strategy_out_where_as_many_differ_as_ever() -> None:
    recorded = RecordedRates((0.1, 350), (0.02, 350))
    calm = changed = InUse("float32")
    for number in range(1000):
        differs = number % 10 == 0
        calm = calm.with_answer(differs, number % 50 == 0, recorded)
        changed = changed.with_answer(differs, differs and number > 500, recorded)
    assert not calm.out
    assert calm.figures["unsupported"] == 2.0
    assert changed.out
    assert (changed.figures["different"], changed.figures["unsupported"]) == (10.0, 4.9)
    assert calm.figures["unsupported_recorded"] < changed.figures["unsupported"]


def test_what_was_kept_before_unsupported_answers_were_counted_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    own = {"engine": "float32", "rate": 0.11, "statistics": [5.0, 5.0, 5.0], "compared": 9, "different": 1}
    place.write_text(json.dumps({"version": 2, "models": {"abc": {"a": {"concat": own}}}}))
    found = record(place).add("a", "concat", True, True, made_at={"a": 1.0})
    assert (found.compared, found.different, found.unsupported) == (10, 2, 1)


def test_a_new_recorded_rate_begins_anew() -> None:
    found = after(*[True] * 5)
    again = found.with_answer(False, recorded=RecordedRates((0.5, 350)))
    assert max(again.statistics) < 1.0 < max(found.statistics)
    assert recorded_rate(0.0, 10_000) == 0.02, "no single answer shows a change"


def test_what_version_1_took_out_stays_out(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    own = {"engine": "float32", "kls": [0.5], "lost": [1.0], "compared": 6, "out": True}
    place.write_text(json.dumps({"version": 1, "models": {"abc": {"a": {"concat": own}}}}))
    found = record(place)
    assert found.taken_out("a") == {"concat"}
    assert found.add("a", "concat", False, made_at={"a": 1.0}).compared == 7
    assert found.out_at("a") == {"concat": None}, "nobody knows when"
    found.clear("a", ["concat"])
    assert (found.taken_out("a"), found.out_at("a")) == (set(), {"concat": None})
    assert record(place).out_at("a") == {"concat": None}, "by another process, too"


def test_what_was_taken_out_stays_out_for_its_namespace_until_it_is_cleared(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    first = record(place)
    for _ in range(12):
        first.add("a", "concat", True, made_at={"a": 1.0, "b": 1.0})
    first.add("b", "concat", False, made_at={"a": 1.0, "b": 1.0})
    again = record(place)
    assert (again.taken_out("a"), again.taken_out("b")) == ({"concat"}, set())
    assert record(place, dtype="bfloat16").taken_out("a") == set(), "another precision"
    assert again.out_at("a")["concat"] == first.out_at("a")["concat"] > 1e9
    again.clear("a", ["epic"])
    assert first.taken_out("a") == {"concat"}
    again.clear("a", ["concat"])
    assert first.taken_out("a") == again.taken_out("a") == set(), "without a restart"
    assert again.entries()["b"]["concat"].compared == 1
    assert list(first.out_at("a")) == ["concat"], "what was compared before is known to be old"
    assert first.entries()["a"]["concat"].figures["recorded"] is None
    assert first.add("a", "concat", False, made_at={"a": 1.0}).compared == 1


def test_what_is_not_out_is_not_forgotten_by_a_verdict(tmp_path: Path) -> None:
    found = record(tmp_path / "in-use.json")
    before = [found.add("a", "concat", number % 3 == 0, made_at={"a": 1.0}) for number in range(6)][-1]
    found.clear("a", ["concat"])
    assert record(tmp_path / "in-use.json").entries()["a"]["concat"] == before


def test_namespaces_that_are_gone_leave_nothing(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    found = record(place)
    found.add("a", "concat", False, made_at={"a": 1.0})
    found.add("b", "concat", False, made_at={"b": 1.0})
    assert list(json.loads(place.read_text())["models"]["abc"]) == ["b"]


def test_a_namespace_that_was_made_again_begins_anew(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    found = record(place)
    for _ in range(12):
        found.add("a", "concat", True, made_at={"a": 1.0})
    found.clear("a", ["concat"])
    assert found.add("a", "concat", False, made_at={"a": 1.0}).compared == 1
    assert in_use.made_at(place) == {"a": {1.0}}
    again = found.add("a", "concat", False, made_at={"a": 2.0})
    assert (again.compared, again.out_at, in_use.made_at(place)) == (1, 0.0, {"a": {2.0}})


def test_a_file_that_is_none_takes_nothing_out(tmp_path: Path) -> None:
    place = tmp_path / "in-use.json"
    place.write_text("[]")
    assert record(place).taken_out("a") == set()
    record(tmp_path / "missing.json").clear("a", ["concat"])
    assert not (tmp_path / "missing.json").exists()
