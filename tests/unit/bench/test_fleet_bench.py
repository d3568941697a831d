"""The simulation of a fleet: its costs, its trace, its policies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ragserve.bench import fleet
from ragserve.errors import InvalidRequest


def test_costs_are_those_that_were_measured() -> None:
    costs = fleet.TokenCosts.measured()
    assert costs.base > 0
    found = costs.per_token
    assert 0 == found["device"] < found["host"] < found["disk"] <= found["absent"]


def test_a_trace_has_the_published_skew_and_topics() -> None:
    requests = list(fleet.skewed_requests(2_000, 10_000, seed=1))
    assert all(len(set(request)) == fleet.PASSAGES for request in requests)
    assert 0.55 < fleet.head_share(requests, 10_000) < 0.65, "RAGCache, figure 5"
    firsts = Counter(request[0] for request in requests)
    assert firsts.most_common(1)[0][1] < 200, "in any order, not the most popular one first"
    assert requests == list(fleet.skewed_requests(2_000, 10_000, seed=1))


def test_cache_aware_follows_prefixes_until_loads_are_far_apart() -> None:
    policy, workers = fleet.cache_aware(apart=4), [fleet.SimulatedWorker() for _ in range(2)]
    first = policy([1, 2, 3, 4, 5], workers)[0]
    other = policy([9, 8, 7, 6, 5], workers)[0]
    assert other != first, "to the one that was sent less"
    assert policy([1, 2, 3, 7, 8], workers)[0] == first, "three of five documents, in order"
    workers[first].in_flight = 5
    assert policy([1, 2, 3, 4, 5], workers)[0] == other
    workers[first].in_flight = 0
    assert policy([2, 1, 3, 4, 5], workers)[0] in (0, 1)


def test_tiers_push_their_oldest_documents_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "CAPACITY", {"device": 1, "host": 2, "disk": 3})
    worker = fleet.SimulatedWorker()
    assert [worker.fetch(document) for document in (1, 2, 3, 4)] == ["absent"] * 4
    assert [worker.fetch(document) for document in (4, 3, 2, 1)] == ["device", "host", "disk", "absent"]


def test_ours_finds_more_than_what_does_not_look_at_documents(tmp_path: Path) -> None:
    fleet.run(tmp_path, quick=True, simulate_only=True)
    report = json.loads((tmp_path / "fleet-simulated.json").read_text())
    found = {row["policy"]: row for row in report["rows"]}
    ours = next(row for name, row in found.items() if "ours" in name)
    assert ours["found %"] > found["random"]["found %"] + 3
    assert found["one big worker"]["found %"] >= ours["found %"]
    assert ours["first token ms p99"] < found["random"]["first token ms p99"]
    assert ours["busiest / mean"] < 1.5


def test_a_replay_needs_a_trace() -> None:
    with pytest.raises(InvalidRequest, match="--data"):
        fleet.run(None)
