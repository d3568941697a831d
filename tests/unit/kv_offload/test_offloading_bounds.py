"""Ranks agree on working sets and on the link whatever each of them has measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.kv_offload.resident.link_meter import LEAST_BYTES, LinkMeter
from sglang_ext.kv_offload.resident.working_set import OffloadBounds, resident_blocks_for, resized

CHOICE = 8


class Voters:
    """Ranks that vote in threads of one process."""

    def __init__(self, count: int) -> None:
        self._votes: dict[int, Sequence[int]] = {}
        self._all = Barrier(count)

    def rank(self, number: int) -> Any:
        def min_votes(votes: Sequence[int]) -> list[int]:
            self._votes[number] = votes
            self._all.wait(240)
            lowest = [min(each) for each in zip(*self._votes.values(), strict=True)]
            self._all.wait(240)
            return lowest

        return SimpleNamespace(min_votes=min_votes)


def row(largest: int, settled: bool) -> Any:
    loads = SimpleNamespace(largest_set=largest)
    return SimpleNamespace(loads=loads, settled=settled, selection=CHOICE, collect=lambda: None)


def test_ranks_decide_alike_over_random_histories() -> None:
    world, voters = 3, Voters(3)

    def history(rank: int) -> list[Any]:
        shared, own = random.Random(1), random.Random(rank + 10)
        bounds = OffloadBounds()
        bounds.ranks = voters.rank(rank)
        resident_blocks, decided = [2 * CHOICE] * 4, []
        now = 0.0
        for at in range(60):
            for _ in range(16):
                now += own.uniform(1e-3, 3e-3)
                bounds.link.step(now)
                size = own.randrange(4 * LEAST_BYTES)
                bounds.link.loaded(size, own.randrange(size + 1), own.uniform(1e-4, 1e-3))
            settled = [shared.random() < 0.5 for _ in resident_blocks]
            offloaded = [shared.random() < 0.8 for _ in resident_blocks]
            rows = [
                row(own.randrange(40), done) if there else None
                for there, done in zip(offloaded, settled, strict=True)
            ]
            sets = bounds.exchange(rows)
            assert all(
                each is None or pages >= each.loads.largest_set
                for each, pages in zip(rows, sets, strict=True)
            )
            resident_blocks = [
                resized(held, pages, CHOICE, others_wait=at % 3 == 0, settled=done) if pages else held
                for held, pages, done in zip(resident_blocks, sets, settled, strict=True)
            ]
            running: Any = [SimpleNamespace(moved=shared.random() < 0.5) for _ in range(at % 5)]
            decided.append(
                (sets, resident_blocks, bounds.link_allows(running), bounds.first_resident_blocks(CHOICE))
            )
        return decided

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(history, range(world)))
    assert found[0] == found[1] == found[2]
    assert {allowed for _, _, allowed, _ in found[0]} == {True, False}, "the link was full at times"
    assert len({first for *_, first in found[0]}) > 1, "new requests begin with what others took"


@pytest.mark.parametrize(
    ("resident_blocks", "working_set", "others_wait", "settled", "want"),
    [
        (16, 20, False, False, 20),
        (16, 20, True, True, 16),
        (16, 12, False, True, 12),
        (16, 12, True, False, 16),
        (16, 3, False, True, CHOICE),
        (9, 8, False, True, 8),
        (40, 1000, False, True, 16 * CHOICE),
    ],
    ids=["grows", "others-wait", "shrinks", "too-early", "one-selection", "by-one", "most"],
)
def test_the_number_of_resident_blocks_follows_the_working_set(
    resident_blocks: int, working_set: int, others_wait: bool, settled: bool, want: int
) -> None:
    assert resized(resident_blocks, working_set, CHOICE, others_wait=others_wait, settled=settled) == want


def test_a_few_resident_blocks_are_not_given_back() -> None:
    assert resized(64, 61, 32, others_wait=False, settled=True) == 64
    assert resized(64, 60, 32, others_wait=False, settled=True) == 60
    assert resident_blocks_for(60, 32) == 60


def test_the_link_is_shared_by_what_is_loaded_a_step_and_what_it_moves_meanwhile() -> None:
    """Steps of 5 ms, in which a link of 40 GB/s moves 200 MB; loads of 100 MB every fourth step."""
    link = LinkMeter()
    now = 0.0
    for step in range(401):
        link.step(now)
        now += 0.005
        if step % 4 == 0:
            link.loaded(100_000_000, 20_000_000, 80_000_000 / 40e9)
            link.loaded(1000, 0, 1.0)  # too little to tell the rate
        if step % 16 == 15:
            link.settle()
    assert link.rate == pytest.approx(40e9)
    assert link.step_seconds == pytest.approx(0.005)
    assert link.share == pytest.approx(0.125, rel=0.05)
    link.given = 20e9
    assert link.share == pytest.approx(0.25, rel=0.05)
    link.pause()
    link.step(now + 100)
    link.step(now + 100.005)
    link.settle()
    assert link.step_seconds == pytest.approx(0.005), "a pause is no step"


def test_where_the_link_is_not_measured_it_bounds_nothing() -> None:
    link = LinkMeter()
    for step in range(20):
        link.step(step * 0.01)
        link.loaded(10**9, 0, None)
    link.settle()
    assert (link.step_bytes > 0, link.share) == (True, 0.0)
