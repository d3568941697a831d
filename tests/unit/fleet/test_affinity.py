"""The choice of a worker: balance, movement, the bound on load."""

from __future__ import annotations

import numpy as np
import pytest

from ragserve.fleet.affinity import (
    BOUND,
    COPIES,
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
    own = owners(hashes, names(3)).tolist()
    documents = [(each, 10 if owner == own[0] else 1) for each, owner in zip(hashes, own, strict=True)]
    none = [0, 0, 0]
    assert ranked(tokens_held(documents, names(3)), none, none)[0] == own[0]
    other = (own[0] + 1) % 3
    held = {names(3)[other]: 10_000, "a worker that is gone": 10**9}
    order = ranked(tokens_held(documents, names(3), held=held), none, none)
    assert order[:2] == [other, own[0]], "a session's tokens count, too"


def test_a_queue_outweighs_what_is_held() -> None:
    assert ranked([1000, 400], [1, 0], [1100, 0])[0] == 0
    assert ranked([1000, 400], [1, 0], [1300, 0])[0] == 1


def test_documents_that_are_asked_for_together_gather_on_one_worker() -> None:
    """A topic's documents have owners everywhere; requests about it still come to go to one worker."""
    there, loads = names(8), [0] * 8
    topic = [(int(each), 10) for each in DOCUMENTS[:24]]
    draw = np.random.default_rng(1)
    found: dict[bool, list[float]] = {True: [], False: []}
    for remembers in found:
        holders = Holders()
        for _ in range(60):
            asked = [topic[i] for i in draw.choice(len(topic), 5, replace=False)]
            best = ranked(tokens_held(asked, there, holders=holders), loads, loads)[0]
            found[remembers].append(sum(there[best] in holders.of(document) for document, _ in asked) / 5)
            if remembers:
                holders.note(there[best], [document for document, _ in asked])
    assert np.mean(found[True][30:]) > 0.9
    assert np.mean(found[False]) == 0


def test_who_has_answered_counts_in_place_of_the_owner() -> None:
    """The owner's copy is the older one, and may be gone."""
    there, document = names(2), int(DOCUMENTS[0])
    owner = int(owners([document], there)[0])
    holders = Holders()
    assert tokens_held([(document, 5)], there, holders=holders)[owner] == 5
    holders.note(there[1 - owner], [document])
    assert tokens_held([(document, 5)], there, holders=holders)[owner] == 0
    assert tokens_held([(document, 5)], there, holders=holders)[1 - owner] == 5
    holders.note(there[owner], [document])
    assert tokens_held([(document, 5)], there, holders=holders) == [5, 5]


def test_holders_are_remembered_in_bounded_space() -> None:
    holders = Holders(most=3)
    for number in range(COPIES + 2):
        holders.note(f"w{number}", [1])
    assert len(holders.of(1)) == COPIES
    assert holders.of(1)[-1] == f"w{COPIES + 1}"
    holders.note("w", [2, 3, 1, 4])
    assert [bool(holders.of(each)) for each in (1, 2, 3, 4)] == [True, False, True, True], "the oldest goes"
    assert sum(tokens_held([(1, 5)], ["x", "y"], holders=holders)) == 5, "workers that are gone do not count"


def test_no_worker_gets_more_than_its_bound() -> None:
    """Every request is about the same documents: without a bound all would go to one worker."""
    loads = [0] * 8
    for _ in range(800):
        room = capacity(loads)
        first = ranked([100, 50, 0, 0, 0, 0, 0, 0], loads, [0] * 8)[0]
        assert loads[first] < room
        loads[first] += 1
    assert max(loads) <= int(BOUND * 100) + 1
    assert loads[0] == max(loads), "the owner takes what it may"
    assert loads[1] > max(loads[2:])


def test_one_request_at_a_time_always_goes_to_the_owner() -> None:
    assert ranked([0, 7, 3], [0, 0, 0], [0, 0, 0])[0] == 1
    assert capacity([0, 0, 0]) == 1
    assert capacity([]) == 2


def test_a_hash_is_the_first_half_of_a_key() -> None:
    assert document_hash("00000000000000ff" + "a" * 16) == 255
