"""shared_assign, selection after selection, against plain torch; tests/unit/kv_offload/test_shared_blocks.py
holds that to a dict."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.paged import PageSelection
from ragserve_kernels.shared_assign import (
    SharedMoves,
    SharedState,
    shared_arrive,
    shared_arrive_naive,
    shared_assign,
    shared_assign_naive,
    shared_expect,
    shared_expect_naive,
    shared_rest,
    shared_rest_naive,
)

LAYERS, HEADS = 2, 3
LISTS = LAYERS * HEADS


def empty(host_pages: int, pool: int, pages: int, device: torch.device) -> SharedState:
    def filled(count: int, value: int) -> torch.Tensor:
        return torch.full((count * LISTS + 1,), value, dtype=torch.int32, device=device)

    return SharedState(filled(host_pages, -1), filled(pool, -1), filled(pool, 0), filled(pages, 0))


def ranking(n: int, pages: int, device: torch.device) -> PageSelection:
    """Some entries are none, some pages are not on the host, some heads attend to nothing."""
    blocks = torch.rand(LAYERS, HEADS, pages + 3).argsort(-1)[..., :n].int()
    blocks = blocks.masked_fill(torch.rand(blocks.shape) < 0.1, -1)
    counts = torch.randint(n + 1, (LAYERS, HEADS)).int()
    return PageSelection(blocks.to(device).contiguous(), counts.to(device))


@pytest.mark.parametrize(
    ("n", "pages", "resident_blocks"), [(5, 30, 3), (33, 60, 12), (9, 9, 20), (400, 500, 210)]
)
def test_selections_in_a_row(device: torch.device, n: int, pages: int, resident_blocks: int) -> None:
    """Of two requests in turn; the largest takes more than one step of a program."""
    pool, host_pages = 2 * resident_blocks + 5, 2 * pages + 4
    mine, other = (empty(host_pages, pool, pages, device) for _ in range(2))
    hosts = torch.randperm(host_pages, dtype=torch.int32).to(device)
    own = torch.randperm(pool)[: 2 * resident_blocks, None] * LISTS + torch.arange(LISTS)
    rows = []
    for i in range(2):
        named = [state.named.clone() for state in (mine, other)]
        shared_blocks = own[i * resident_blocks : (i + 1) * resident_blocks].flatten().to(device)
        rows.append((hosts[i * pages : (i + 1) * pages].contiguous(), shared_blocks, named))
    moved = 0
    for number in range(1, 16 if n < 100 else 5):
        for host, shared_blocks, named in rows:
            selection = ranking(n, pages, device)
            options = {"number": number, "counted": 2 * LISTS, "recent": 3}
            got = shared_assign(selection, mine._replace(named=named[0]), host, shared_blocks, **options)
            want = shared_assign_naive(
                selection, other._replace(named=named[1]), host, shared_blocks, **options
            )
            moved += int(want.n_moves)
            for ours, theirs in zip(got, want, strict=True):
                assert torch.equal(ours, theirs)
            assert torch.equal(named[0][:-1], named[1][:-1])
            for arrived in (False, True):
                if arrived:
                    shared_arrive(got, mine)
                    shared_arrive_naive(want, other)
                assert torch.equal(mine.of, other.of)
                assert torch.equal(mine.held, other.held)
                assert torch.equal(mine.used[:-1], other.used[:-1])
    assert moved > 0


@pytest.mark.parametrize(("n", "pages", "resident_blocks"), [(5, 30, 3), (33, 60, 12), (400, 500, 210)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_what_attention_has_not_filled_is_left(
    device: torch.device, n: int, pages: int, resident_blocks: int, share: float
) -> None:
    mine, other = (empty(pages, resident_blocks + 2, pages, device) for _ in range(2))
    host = torch.randperm(pages, dtype=torch.int32).to(device)
    own = (
        (torch.randperm(resident_blocks + 2)[:resident_blocks, None] * LISTS + torch.arange(LISTS))
        .flatten()
        .to(device)
    )
    for number in range(1, 8 if n < 100 else 4):
        selection, options = ranking(n, pages, device), {"number": number, "counted": LISTS, "recent": 3}
        got = shared_assign(selection, mine, host, own, **options)
        want = shared_assign_naive(selection, other, host, own, **options)
        shared_expect(got, mine)
        shared_expect_naive(want, other)
        assert torch.equal(mine.of[:-1], other.of[:-1])
        assert torch.equal(mine.held[:-1], other.held[:-1])
        moves = int(want.n_moves)
        filled = (torch.rand(moves) < share).to(device)
        entries, shared_blocks = want.entries[:moves][filled].long(), want.shared_blocks[:moves][filled]
        for state in (mine, other):
            state.of[entries] = shared_blocks
        got, left = shared_rest(got, mine), shared_rest_naive(want, other)
        for ours, theirs in zip(got, left, strict=True):
            assert torch.equal(ours, theirs)
        assert left.tally.tolist()[1:3] == [int((~filled).sum()), int(filled.sum())]
        assert torch.equal(left.entries[: int(left.n_moves)], want.entries[:moves][~filled])
        assert torch.equal(mine.of[:-1], other.of[:-1])
        assert torch.equal(mine.held[:-1], other.held[:-1])
        assert int(mine.of[:-1].min()) >= -1
        shared_arrive(got, mine)
        shared_arrive_naive(left, other)
        assert torch.equal(mine.of[:-1], other.of[:-1])


def test_arguments_are_checked(device: torch.device) -> None:
    state, selection = empty(9, 6, 5, device), ranking(3, 5, device)
    host = torch.arange(5, dtype=torch.int32, device=device)
    own = torch.arange(LISTS, device=device)

    def call(**changed: object) -> SharedMoves:
        given = {"selection": selection, "state": state, "host": host, "own": own} | changed
        options = {"number": 1, "counted": 1, "recent": 1, **given.pop("options", {})}  # type: ignore[dict-item]
        return shared_assign(**given, **options)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="own has dtype"):
        call(own=own.int())
    with pytest.raises(ValueError, match=r"selection.counts has shape"):
        call(selection=selection._replace(counts=selection.counts[:1]))
    with pytest.raises(ValueError, match=r"state.used has shape"):
        call(state=state._replace(used=state.used[1:]))
    with pytest.raises(ValueError, match=r"state.named has shape"):
        call(host=host[1:])
    with pytest.raises(ValueError, match="number is 0"):
        call(options={"number": 0})
    moves = call()
    with pytest.raises(ValueError, match=r"moves.shared_blocks has shape"):
        shared_arrive(moves._replace(shared_blocks=moves.shared_blocks[1:]), state)
