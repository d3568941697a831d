"""resident_assign against plain torch, over selections that follow each other; that against a dict in order
of use in tests/unit/kv_offload/test_resident_blocks.py."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.resident_assign import ResidentState, resident_assign, resident_assign_naive


def state_of(device: torch.device, resident_blocks: int, pages: int) -> ResidentState:
    held = torch.full((2, 3, resident_blocks), -1, dtype=torch.int32, device=device)
    return ResidentState(
        held, torch.zeros_like(held), torch.zeros(2, 3, pages, dtype=torch.int32, device=device)
    )


def selection_of(device: torch.device, n: int, pages: int, likely: torch.Tensor) -> PageSelection:
    """Some pages, more often the same ones; those behind ``pages`` are on the device, and there are gaps."""
    score = torch.rand(2, 3, pages + 3) + likely
    blocks = score.topk(n, -1).indices.to(torch.int32)
    blocks[torch.rand(blocks.shape) < 0.1] = -1
    counts = torch.randint(0, n + 1, (2, 3), dtype=torch.int32)
    return PageSelection(blocks.to(device).contiguous(), counts.to(device))


@pytest.mark.parametrize(
    ("resident_blocks", "n", "pages"), [(5, 5, 30), (8, 4, 40), (48, 33, 120), (20, 16, 600), (150, 9, 170)]
)
def test_selections_in_a_row(device: torch.device, resident_blocks: int, n: int, pages: int) -> None:
    got, want = state_of(device, resident_blocks, pages), state_of(device, resident_blocks, pages)
    host = torch.randperm(1000, device=device)[:pages].to(torch.int32)
    resident_pages = torch.randperm(1000, device=device)[: resident_blocks + 2].to(torch.int32)
    likely = torch.rand(2, 3, pages + 3)
    were_late = loaded = there = 0
    for number in range(1, 200):
        selection = selection_of(device, n, pages, likely)
        ours = resident_assign(selection, got, host, resident_pages, number=number, recent=3)
        plain = resident_assign_naive(selection, want, host, resident_pages, number=number, recent=3)
        for name, one, other in zip(ours._fields, ours, plain, strict=True):
            assert torch.equal(one, other), (name, number)
        for name, one, other in zip(got._fields, got, want, strict=True):
            assert torch.equal(one, other), (name, number)
        hits, _, late, _ = ours.tally.sum((0, 1)).tolist()
        there, were_late, loaded = there + hits, were_late + late, loaded + int((ours.source >= 0).sum())
        seen = there and loaded and (were_late or resident_blocks != n)
        if number >= 8 and seen:
            break
    assert seen, "there, loaded, and late where all resident blocks are selected"
    if resident_blocks >= 2 * n:
        assert were_late == 0, "there are always others"


def test_forced_naive_gives_the_same(device: torch.device) -> None:
    selection = selection_of(device, 6, 20, torch.zeros(2, 3, 23))
    numbers = torch.arange(20, dtype=torch.int32, device=device)
    one, other = state_of(device, 12, 20), state_of(device, 12, 20)
    found = resident_assign(selection, one, numbers, numbers, number=1, recent=2)
    with forced_naive():
        plain = resident_assign(selection, other, numbers, numbers, number=1, recent=2)
    assert all(torch.equal(a, b) for a, b in zip((*found, *one), (*plain, *other), strict=True))


def test_bad_arguments(device: torch.device) -> None:
    selection = selection_of(device, 6, 20, torch.zeros(2, 3, 23))
    numbers = torch.arange(20, dtype=torch.int32, device=device)
    state = state_of(device, 12, 20)
    with pytest.raises(ValueError, match="12 resident blocks and 3 pages"):
        resident_assign(selection, state, numbers, numbers[:3], number=1, recent=2)
    with pytest.raises(ValueError, match="number is 0"):
        resident_assign(selection, state, numbers, numbers, number=0, recent=2)
    with pytest.raises(ValueError, match=r"state\.named"):
        resident_assign(selection, state, numbers[:4], numbers, number=1, recent=2)
    with pytest.raises(TypeError, match="host"):
        resident_assign(selection, state, numbers.long(), numbers, number=1, recent=2)
