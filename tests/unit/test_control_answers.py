"""Answers of the control operations on one rank and on several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_ext.control import answer


def asked(ours: dict[str, Any], theirs: dict[str, Any], op: str = "where") -> dict[str, Any]:
    """The answer of the first rank, whose document is ``ours``, beside a rank with ``theirs``."""

    def where(figures: dict[str, Any]) -> dict[str, Any]:
        below = {name: value for name, value in figures.items() if name != "where"}
        return {
            "on_device": [True],
            "on_host": [figures["where"][0]],
            "below": [figures["where"][1]],
            **below,
        }

    runtime = SimpleNamespace(
        documents=SimpleNamespace(document_tokens=lambda: {"d": 5}),
        tiers=SimpleNamespace(
            where=lambda key, namespace: ours["where"],
            room=lambda: {name: value for name, value in ours.items() if name != "where"},
        ),
        ranks=SimpleNamespace(gather=lambda mine: [mine, (where(theirs), "")], world=2),
    )
    body = {"op": op, "keys": ["d"], "tokens": [5], "namespace": "n"}
    return dict(answer(runtime, body)["response"][0])


def test_a_document_is_where_all_ranks_have_it() -> None:
    room = {"faults": {"io": 1}, "budget_bytes": 100, "page_bytes": 8, "block": 16, "lasting": "disk"}
    ours = {"where": (True, "disk"), **room}
    for theirs, below in (
        ((True, "disk"), "disk"),
        ((False, "writing"), "writing"),
        ((True, "host"), "host"),
        ((False, "absent"), "absent"),
    ):
        found = asked(ours, {"where": theirs, **room, "faults": {"crc": 2, "io": 3}})
        assert (found["on_host"], found["below"]) == ([theirs[0]], [below])
        assert found["on_device"] == [True]
        assert (found["budget_bytes"], found["page_bytes"], found["block"]) == (200, 16, 16)
        assert found["faults"] == {"io": 4, "crc": 2}
    assert asked({**ours, "budget_bytes": None}, {**ours, "budget_bytes": None})["budget_bytes"] is None


def test_a_budget_is_shared_by_the_ranks() -> None:
    given: dict[str, int] = {}
    runtime = SimpleNamespace(
        tiers=SimpleNamespace(set_budget=given.update),
        ranks=SimpleNamespace(gather=lambda mine: [mine] * 4, world=4),
    )
    assert answer(runtime, {"op": "budget", "host_bytes": 4096})["success"]
    assert given == {"host_bytes": 1024}
