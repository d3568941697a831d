"""What a comparison asks next: all candidates on a first part of the probes, then those picked on others."""

from __future__ import annotations

from typing import Any

from ragserve.verification.course import PICK, Course, course, picks, survivors

LABELS = ["passages:count=1", "passages:count=3", "concat", "concat:recompute=all"]
MS = {"full": 100.0, "passages:count=1": 20.0, "passages:count=3": 50.0, "concat": 30.0}


def rows(
    count: int, lost: dict[str, float], *, part: str = "pick", score: float = 1.0
) -> list[dict[str, Any]]:
    """Probes that full answers; ``lost``: the share of them that strategies lose."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        about: dict[str, Any] = {"id": str(number), "part": part, "error": None}
        found.append({**about, "strategy": "full", "score": score, "ttft_ms": 100.0})
        for label in LABELS:
            own = 0.0 if (number * 7 % count) < lost.get(label, 0.0) * count else score
            ms = MS.get(label, 98.0)
            found.append({**about, "strategy": label, "score": own, "full_score": score, "ttft_ms": ms})
    return found


def following(known: list[dict[str, Any]], shut: frozenset[str] = frozenset(), **more: Any) -> Course:
    return course(LABELS, known, margin=5.0, open_=lambda label: label not in shut, **more)


def test_candidates_are_compared_first_and_then_the_picked_ones_on_other_probes() -> None:
    assert following([]) == Course("pick", LABELS)
    assert following(rows(15, {})).part == "pick"
    assert following(rows(PICK, {})) == Course("verify", ["passages:count=1", "concat"])
    both = [*rows(10, {}), *rows(3, {}, part="verify")]
    assert following(both).part == "verify", "what has begun goes on"
    assert following(rows(8, {}), pick_time=lambda: False).part == "verify"
    assert following(rows(7, {}), pick_time=lambda: False).part == "pick", "too few to pick by"


def test_the_first_part_ends_when_probes_no_longer_change_what_is_picked() -> None:
    assert following(rows(16, {})) == following(rows(PICK, {}))
    late = rows(8, {"passages:count=1": 1.0})
    changed = [*rows(30, {}), *({**row, "id": f"late {row['id']}"} for row in late)]
    assert following(changed).part == "pick", "the soonest is no longer as good as the others"
    more = rows(PICK - 38, {})
    assert following([*changed, *({**row, "id": f"more {row['id']}"} for row in more)]).part == "verify"


def test_what_earlier_runs_asked_other_candidates_picks_none() -> None:
    """A run of few candidates verifies without a first part, and the first part may be of others."""
    one = [row for row in rows(60, {}, part="verify") if row["strategy"] in ("full", "concat")]
    assert following(one) == Course("pick", LABELS), "concat alone was verified"
    others = [row | {"strategy": row["strategy"].replace("c", "x")} for row in rows(PICK, {})]
    assert following([*others, *one]) == Course("pick", LABELS)
    shared = [row for row in rows(PICK, {}) if row["strategy"] in ("full", "concat")]
    assert following([*shared, *one]) == Course("pick", LABELS), "the others have not been asked"
    some = [row for row in rows(PICK, {}) if int(row["id"]) < 9]
    assert following([*shared, *some]).part == "pick", "nine probes of the others are not clear"
    assert following([*shared, *some, *rows(3, {}, part="verify")]).part == "verify"


def test_what_was_verified_on_the_first_part_is_held_against_others_there() -> None:
    """It was given later, and alone: questions that others were picked by may verify it."""
    known = rows(PICK, {"concat": 0.5})
    for row in known:
        if row["strategy"] == "concat":
            row |= {"part": "verify"}
    assert following(known) == Course("verify", ["passages:count=1"])
    for row in known:
        if row["strategy"] == "concat":
            row |= {"score": 1.0}
    assert following(known) == Course("verify", ["passages:count=1", "concat"])


def test_a_candidate_that_always_fails_does_not_hold_up_the_others() -> None:
    known = rows(PICK, {})
    for row in known:
        if row["strategy"] == "concat":
            row |= {"error": "engine_error: x", "score": None, "full_score": None}
    assert following(known) == Course("verify", ["passages:count=1"])


def test_few_candidates_need_no_picking() -> None:
    assert course(["concat"], [], margin=5.0, open_=lambda label: True) == Course("verify", ["concat"])


def test_what_is_decided_is_asked_no_more_and_another_takes_the_place_of_what_was_refused() -> None:
    known = rows(PICK, {})
    assert following(known, frozenset({"passages:count=1"})).labels == ["concat", "passages:count=3"]
    assert following(known, frozenset(LABELS)) == Course("verify", [])


def test_what_can_change_nothing_is_asked_no_more() -> None:
    """What is verified is as soon and as good."""
    known = rows(PICK, {})
    done = {"passages:count=1"}
    found = following(known, frozenset(done), verified=lambda label: label in done)
    assert found.labels == [], "the others are later and no better"
    better = rows(PICK, {"passages:count=1": 0.05})
    found = following(better, frozenset(done), verified=lambda label: label in done)
    assert "concat" in found.labels


def test_what_is_shown_to_lose_or_is_no_sooner_is_left_out() -> None:
    left = survivors(LABELS, rows(20, {"concat": 0.9}), 5.0)
    assert left == ["passages:count=1", "passages:count=3"], "everything computed again is no sooner"
    assert survivors(LABELS, rows(7, {"concat": 1.0}), 5.0) == LABELS


def test_the_soonest_of_the_best_is_picked_with_the_best_and_the_other_kind() -> None:
    assert picks(LABELS, rows(40, {"passages:count=1": 0.5})) == ["concat", "passages:count=3"]
    # within two points of the best
    assert picks(LABELS, rows(100, {"passages:count=1": 0.01, "concat": 0.5})) == [
        "passages:count=1",
        "passages:count=3",
    ]
    assert picks(LABELS, []) == []
