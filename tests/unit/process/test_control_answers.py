"""Answers of the control operations on one rank and on several."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.documents.disk.disk import FileTier
from sglang_ext.process import control
from sglang_ext.process.control import answer
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.stages import stages
from tests.unit.documents.document_samples import Sample, files_of, flushed, opened


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
        ranks=SimpleNamespace(
            first=lambda own: own, gather=lambda mine: [mine, (where(theirs), "")], world=2
        ),
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


def test_a_shared_folder_is_counted_once() -> None:
    """Every rank counts the bytes of all engines and ranks, each at its own time."""
    mine = {"away": False, "bytes": 90, "budget_bytes": 1000, "queued_bytes": 5, "stored": 3}
    theirs = {"away": True, "bytes": 100, "budget_bytes": 1000, "queued_bytes": 6, "stored": 3}
    found = asked({"where": (True, "disk"), "remote": mine}, {"where": (True, "disk"), "remote": theirs})
    assert found["remote"] == {
        "away": True,
        "bytes": 100,
        "budget_bytes": 1000,
        "queued_bytes": 11,
        "stored": 3,
    }


def test_a_page_of_offloaded_requests_is_a_part_of_it_on_every_rank() -> None:
    mine = {"bytes": 80, "pages": 5, "numbers": 9, "used": 2, "document_pages": 3}
    where = (True, "disk")
    found = asked({"where": where, "offloaded": mine}, {"where": where, "offloaded": mine})
    assert found["offloaded"] == mine | {"bytes": 160}


def test_an_operation_that_one_rank_fails_alone_ends_the_server() -> None:
    """The others wait for it in a collective of the operation, not in that of the answer."""

    def divided(body: dict[str, Any], fingerprint: str) -> None:
        raise stages.RanksDivided

    composition = SimpleNamespace(score=divided)
    runtime = SimpleNamespace(composition=composition, fingerprint="", ranks=Ranks())
    with pytest.raises(stages.RanksDivided):
        answer(runtime, {"op": "score"})


def test_a_budget_is_shared_by_the_ranks() -> None:
    given: dict[str, int] = {}
    runtime = SimpleNamespace(
        tiers=SimpleNamespace(set_budget=given.update),
        ranks=SimpleNamespace(first=lambda own: own, gather=lambda mine: [mine] * 4, world=4),
    )
    assert answer(runtime, {"op": "budget", "host_bytes": 4096})["success"]
    assert given == {"host_bytes": 1024}


def runtime_of(store: Any) -> Any:
    return SimpleNamespace(
        tiers=store,
        ranks=Ranks(),
        sweep=lambda: None,
        check_integrity=store.check_integrity,
        documents=SimpleNamespace(evict=lambda tiers, keys: store.drop_host(keys)),
    )


def ended(runtime: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Ask until the operation is not pending any more."""
    deadline = time.monotonic() + 240
    while "pending" in (found := answer(runtime, body)["response"][0]):
        assert time.monotonic() < deadline
        body = {**body, "pending": found["pending"]}
        time.sleep(0.005)
    return dict(found)


class SlowDisk:
    """Holds back calls of a method of the disk tier until ``go``, or for four minutes."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        self.go = threading.Event()
        original = getattr(FileTier, method)

        def slowly(tier: FileTier, *args: Any) -> Any:
            self.go.wait(240)
            return original(tier, *args)

        patch.setattr(FileTier, method, slowly)


def test_verification_runs_beside_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Sample(i, 16) for i in range(3)]
    with opened(tmp_path) as store:
        for document in documents:
            document.put(store)
        flushed(store)
        runtime, disk = runtime_of(store), SlowDisk(monkeypatch, "verify")
        first, second = (answer(runtime, {"op": "verify"})["response"][0] for _ in range(2))
        assert first == second, "the second caller waits for the one that runs"
        assert set(first) == {"pending"}
        disk.go.set()
        for begun in (first, second):
            assert ended(runtime, {"op": "verify", **begun}) == {"pages": 12, "bad": []}
        damaged = files_of(tmp_path)[0]
        damaged.write_bytes(damaged.read_bytes()[:-1])
        assert len(ended(runtime, {"op": "verify"})["bad"]) == 1, "a new one reads everything again"


@pytest.mark.parametrize("body", [{"op": "flush"}, {"op": "evict", "tiers": ["host"]}])
def test_waiting_for_the_disk_does_not_hold_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    document = Sample(1, 16)
    with opened(tmp_path) as store:
        runtime, disk = runtime_of(store), SlowDisk(monkeypatch, "write")
        document.put(store)
        assert set(answer(runtime, body)["response"][0]) == {"pending"}
        assert store.where(document.key, "default") == (True, "writing")
        assert ended(runtime, {**body, "timeout_s": 0.01}) == {}, "it does not wait for ever"
        disk.go.set()
        assert ended(runtime, body) == {}
        assert store.where(document.key, "default") == (body["op"] == "flush", "disk")


class Clocks:
    """Those of a host, seconds: the wall clock steps back an hour whenever it is read."""

    def __init__(self) -> None:
        self.now, self._wall = 100.0, 1e9

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        self._wall -= 3600
        return self._wall


def waiting_on(op: str) -> tuple[Any, dict[str, Any]]:
    """An engine whose disk and shared store never get done with anything, and the operation's body."""
    tiers = SimpleNamespace(
        flush=lambda timeout_s: False,
        where=lambda key, namespace: (False, "absent"),
        looks_for=lambda key, namespace: True,
        room=dict,
        unconfirmed=lambda keys, namespace: (len(keys), True),
    )
    documents = SimpleNamespace(document_tokens=dict, remove=lambda keys, namespace: len(keys))
    runtime = SimpleNamespace(tiers=tiers, documents=documents, ranks=Ranks(), sweep=lambda: None)
    return runtime, {"op": op, "keys": ["d"], "tokens": [5], "namespace": "n"}


@pytest.mark.parametrize(("op", "seconds"), [("flush", 30), ("where", 2), ("remove", 20)])
def test_a_wall_clock_that_steps_back_prolongs_no_wait(
    monkeypatch: pytest.MonkeyPatch, op: str, seconds: float
) -> None:
    clocks = Clocks()
    monkeypatch.setattr(control, "time", clocks)
    runtime, body = waiting_on(op)
    pending = answer(runtime, body)["response"][0]
    assert set(pending) == {"pending"}
    clocks.now += seconds - 1
    assert answer(runtime, {**body, **pending})["response"][0] == pending
    clocks.now += 2
    assert "pending" not in answer(runtime, {**body, **pending})["response"][0]


def test_ranks_of_several_hosts_wait_by_the_first_ones_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have been up for other times."""
    monkeypatch.setattr(control, "time", Clocks())
    runtime, body = waiting_on("flush")
    runtime.ranks = SimpleNamespace(first=lambda own: 7.0, all_agree=bool, gather=lambda own: [own], world=2)
    assert answer(runtime, body)["response"] == [{"pending": 37.0}]
