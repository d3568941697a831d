"""The simulation of a fleet: its costs, its trace, its policies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ragserve.bench import fleet
from ragserve.errors import InvalidRequest


def test_costs_are_those_that_were_measured() -> None:
    costs = fleet.TokenCosts.measured()
    assert costs.base > 0
    found = costs.per_token
    assert 0 == found["device"] < found["host"] < found["disk"] <= found["absent"]
    assert found["host"] < found["remote"] <= found["absent"]


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


def test_workers_share_what_one_of_them_has_retrieved_often_enough() -> None:
    # 64 MiB and 64 ms a retrieval: worth a value of 2 at the second
    costs = fleet.TokenCosts(1.0, dict.fromkeys((*fleet.TIERS, fleet.REMOTE, "absent"), 64 / 512))
    store = fleet.SimulatedStore(costs, value=2.0, capacity=2)
    one, other = fleet.SimulatedWorker(), fleet.SimulatedWorker()
    assert [one.fetch(1, store=store), other.fetch(1, store=store)] == ["absent", "absent"], "once each"
    assert one.fetch(1, store=store) == "device"
    third = fleet.SimulatedWorker()
    assert third.fetch(1, store=store) == fleet.REMOTE
    assert third.fetch(1, store=store) == "device", "and has it from now on"
    for document in (2, 3):  # which leaves no room for the first
        assert [one.fetch(document, store=store) for _ in range(2)] == ["absent", "device"]
    assert store.stored == 3
    assert [fleet.SimulatedWorker().fetch(n, store=store) for n in (1, 2)] == ["absent", fleet.REMOTE]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Rows of a small simulation, without a shared store and with one, by the file's name."""
    folder = tmp_path_factory.mktemp("simulated")
    for shared in (False, True):
        fleet.run(folder, quick=True, simulate_only=True, shared=shared)
    names = ("fleet-simulated", "fleet-simulated-shared")
    return {name: json.loads((folder / f"{name}.json").read_text())["rows"] for name in names}


def test_a_shared_store_adds_to_what_is_found(simulated: dict[str, list[dict[str, Any]]]) -> None:
    alone = {row["policy"]: row for row in simulated["fleet-simulated"]}
    assert all(row["remote %"] == row["MB to the store a request"] == 0 for row in alone.values())
    for row in simulated["fleet-simulated-shared"]:
        name = row["policy"]
        assert row["device + host %"] == alone[name]["device + host %"], "the policies know nothing of it"
        assert row["found %"] >= alone[name]["found %"]
    all_stored = {row["policy"]: row for row in simulated["fleet-simulated-shared"] if not row["store value"]}
    assert all_stored[fleet.OURS]["remote %"] > 0
    assert all_stored[fleet.OURS]["found %"] > 0.9 * all_stored[fleet.BIG]["found %"]


def test_ours_finds_more_than_what_does_not_look_at_documents(
    simulated: dict[str, list[dict[str, Any]]],
) -> None:
    found = {row["policy"]: row for row in simulated["fleet-simulated"]}
    ours = found[fleet.OURS]
    assert ours["found %"] > found["random"]["found %"] + 3
    assert found[fleet.BIG]["found %"] >= ours["found %"]
    assert ours["first token ms p99"] < found["random"]["first token ms p99"]
    assert ours["busiest / mean"] < 1.5


def test_a_replay_needs_a_trace() -> None:
    with pytest.raises(InvalidRequest, match="--data"):
        fleet.run(None)


def test_a_replay_knows_its_policies(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no policy 'best'"):
        fleet.run(None, traces=[tmp_path / "t.trace.jsonl"], only=["ours", "best"])
