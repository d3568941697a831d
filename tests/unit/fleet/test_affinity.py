"""The choice of a worker: balance, movement, the bound on load."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ragserve.fleet.affinity import (
    BELOW,
    BOUND,
    SPARE,
    Holders,
    capacity,
    document_hash,
    owners,
    ranked,
    tokens_held,
)

DOCUMENTS = np.random.default_rng(0).integers(0, 2**63, 40_000, dtype=np.uint64) * np.uint64(2)


def names(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_documents_are_spread_evenly(count: int) -> None:
    share = np.bincount(owners(DOCUMENTS, names(count)), minlength=count) / len(DOCUMENTS) * count
    assert 0.85 < share.min() <= share.max() < 1.15


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_worker_that_leaves_or_joins_moves_its_own_documents_only(count: int) -> None:
    all_names = names(count)
    before = owners(DOCUMENTS, all_names)
    gone = count // 2
    left = [name for name in all_names if name != all_names[gone]]
    after = np.array([all_names.index(left[number]) for number in range(count - 1)])[owners(DOCUMENTS, left)]
    assert (after[before != gone] == before[before != gone]).all()
    taken_over = np.bincount(after[before == gone], minlength=count)
    assert (taken_over[[number for number in range(count) if number != gone]] > 0).all(), "by all the others"


def test_owners_do_not_depend_on_the_order_of_workers() -> None:
    there = names(8)
    other = there[::-1]
    assert [there[i] for i in owners(DOCUMENTS[:500], there)] == [
        other[i] for i in owners(DOCUMENTS[:500], other)
    ]


def test_the_worker_with_most_tokens_comes_first() -> None:
    hashes = [int(each) for each in DOCUMENTS[:6]]
    there, none = names(3), [0, 0, 0]
    holders = Holders()
    holders.note(there[2], [(each, 10) for each in hashes[:4]])
    holders.note(there[0], [(each, 10) for each in hashes[3:]])
    documents = [(each, 10) for each in hashes]
    tokens = tokens_held(documents, there, holders=holders)
    assert [round(each) for each in tokens] == [30, 0, 40]
    assert ranked(tokens, none, none, 60) == [2, 0, 1]
    held = {there[1]: 10_000, "a worker that is gone": 10**9}
    order = ranked(tokens_held(documents, there, holders=holders, held=held), none, none, 60)
    assert order == [1, 2, 0], "a session's tokens count, too"


def test_documents_that_nobody_holds_go_to_their_owner() -> None:
    there, none = names(3), [0, 0, 0]
    document = int(DOCUMENTS[0])
    owner = int(owners([document], there)[0])
    assert ranked(tokens_held([(document, 9)], there), none, none, 9)[0] == owner
    holders = Holders()
    holders.note(there[(owner + 1) % 3], [(document, 9)])
    assert ranked(tokens_held([(document, 9)], there, holders=holders), none, none, 9)[0] != owner


def test_a_queue_outweighs_what_is_held() -> None:
    def best(waiting: list[float], tokens: tuple[float, float] = (1000, 400)) -> int:
        return ranked(tokens, [1, 1], waiting, 1000)[0]

    # 0.3 times the excess, divided by 1 + 2 means, in requests of 1,000 tokens
    assert best([1000, 0], (560, 400)) == 0, "one request ahead, half a one at the mean: 150 tokens"
    assert best([1000, 0], (540, 400)) == 1
    assert best([2000, 1000], (480, 400)) == 0, "one ahead where one and a half is usual: 75 tokens"
    assert best([2000, 1000], (470, 400)) == 1
    assert best([9900, 0]) == 0, "600 tokens more are held there, and 0.06 of what waits is 594"
    assert best([10100, 0]) == 1, "no queue grows without end"
    assert best([109900, 100000]) == 0, "only the difference counts"


def test_documents_that_are_asked_for_together_gather_on_one_worker() -> None:
    """A topic's documents have owners everywhere; requests about it still come to go to one worker."""
    there, loads = names(8), [0] * 8
    topic = [(int(each), 10) for each in DOCUMENTS[:24]]
    draw = np.random.default_rng(1)
    holders, found = Holders(), []
    for _ in range(60):
        asked = [topic[i] for i in draw.choice(len(topic), 5, replace=False)]
        best = ranked(tokens_held(asked, there, holders=holders), loads, loads, 50)[0]
        found.append(sum(there[best] in holders.of(document) for document, _ in asked) / 5)
        holders.note(there[best], asked)
    assert np.mean(found[30:]) > 0.9


def account(
    documents: list[tuple[int, int]], in_memory: int, memory: int, disk: int | None
) -> dict[str, Any]:
    return {
        "documents": [[f"{document:016x}", tokens] for document, tokens in documents],
        "in_memory": in_memory,
        "memory_tokens": memory,
        "disk_tokens": disk,
    }


def test_a_worker_s_account_replaces_what_was_known() -> None:
    holders = Holders()
    holders.note("w", [(1, 10), (2, 10)])
    holders.begin("w", account([(3, 10), (4, 10), (5, 10)], 1, 100, None))
    assert [dict(holders.of(each)) for each in range(1, 6)] == [{}, {}, {"w": BELOW}, {"w": BELOW}, {"w": 1}]
    holders.begin("w", account([], 0, 100, None))
    assert not any(holders.of(each) for each in range(1, 6))


def test_documents_sink_to_the_disk_and_leave_it_in_the_order_of_use() -> None:
    holders = Holders()
    holders.begin("w", account([], 0, 25, 20))
    for document in (1, 2, 1, 3, 4):
        holders.note("w", [(document, 10)])
    # memory has room for two documents, the disk for two more
    assert [holders.of(each).get("w") for each in (1, 2, 3, 4)] == [BELOW, BELOW, 1.0, 1.0]
    holders.note("w", [(5, 10)])
    assert [holders.of(each).get("w") for each in (2, 1, 3, 4, 5)] == [None, BELOW, BELOW, 1.0, 1.0]
    holders.note("w", [(1, 10)])
    assert [holders.of(each).get("w") for each in (1, 3, 4, 5)] == [1.0, BELOW, BELOW, 1.0], "used again"
    holders.note("w", [(9, 1000)])
    assert not any(holders.of(each) for each in (1, 3, 4, 5, 9)), "what is larger than all has pushed all out"


def test_holders_follow_a_plain_reference_through_random_use() -> None:
    draw = random.Random(3)
    sizes = [draw.randint(1, 40) for _ in range(60)]
    rooms = {"a": (200, 300), "b": (90, None)}
    holders, memory, below = Holders(), {w: [] for w in rooms}, {w: [] for w in rooms}
    for worker, (room, disk) in rooms.items():
        holders.begin(worker, account([], 0, room, disk))
    for _ in range(3_000):
        worker = draw.choice("ab")
        used = draw.sample(range(60), draw.randint(1, 4))
        holders.note(worker, [(document, sizes[document]) for document in used])
        for document in used:
            for shelf in (memory[worker], below[worker]):
                if document in shelf:
                    shelf.remove(document)
            memory[worker].append(document)
        room, disk = rooms[worker]
        while sum(sizes[each] for each in memory[worker]) > room:
            below[worker].append(memory[worker].pop(0))
        while disk is not None and sum(sizes[each] for each in below[worker]) > disk:
            below[worker].pop(0)
        for document in range(60):
            want = {w: 1.0 for w in rooms if document in memory[w]}
            want |= {w: BELOW for w in rooms if document in below[w]}
            assert dict(holders.of(document)) == want


def test_holders_are_remembered_in_bounded_space() -> None:
    holders = Holders(most=6)
    holders.note("w", [(each, 5) for each in (1, 2, 3, 4)])
    holders.note("v", [(each, 5) for each in (1, 2, 3, 4)])
    holders.note("w", [(5, 5)])
    held = ["".join(sorted(holders.of(each))) for each in (1, 2, 3, 4, 5)]
    assert held == ["", "v", "vw", "vw", "w"], "three of each, and the oldest go"
    tokens = tokens_held([(5, 5)], ["x", "y"], holders=holders)
    assert max(tokens) < 1, "workers that are gone do not count"


def test_no_worker_gets_more_than_its_bound() -> None:
    """Every request is about the same documents: without a bound all would go to one worker."""
    loads = [0] * 8
    for _ in range(800):
        room = capacity(loads)
        first = ranked([100, 50, 0, 0, 0, 0, 0, 0], loads, [0] * 8, 100)[0]
        assert loads[first] < room
        loads[first] += 1
    assert max(loads) <= int(BOUND * 100) + 1 + SPARE
    assert loads[0] == max(loads), "the holder takes what it may"
    assert loads[1] > max(loads[2:])


def test_few_requests_are_not_bounded_by_chance() -> None:
    """One request for each of four workers: all are about the same documents, and may go to one of them."""
    loads = [0] * 4
    for _ in range(4):
        loads[ranked([7, 3, 0, 0], loads, [0] * 4, 10)[0]] += 1
    assert loads == [4, 0, 0, 0]


def test_one_request_at_a_time_always_goes_to_the_holder() -> None:
    assert ranked([0, 7, 3], [0, 0, 0], [0, 0, 0], 10)[0] == 1
    assert capacity([0, 0, 0]) == 1 + SPARE
    assert capacity([]) == 2 + SPARE


def test_a_hash_is_the_first_half_of_a_key() -> None:
    assert document_hash("00000000000000ff" + "a" * 16) == 255
