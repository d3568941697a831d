"""Shared blocks follow a dict in order of use over all layers and heads, and are looked up only while they
hold what the table says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.shared_assign import SharedMoves
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.resident import shared_blocks as offloading_shared_blocks
from sglang_ext.kv_offload.resident.resident_blocks import EMPTY, RECENT
from sglang_ext.kv_offload.resident.shared_blocks import SharedBlocks, SharedTable

LAYERS, HEADS, RANKED, PAGES, POOL, PAGE = 3, 2, 9, 14, 20, 16
LISTS = LAYERS * HEADS
CHOICE = 4


def some_shared_blocks(device: torch.device | None = None) -> SharedBlocks:
    k, v = ([torch.zeros(POOL * PAGE, HEADS, 64, device=device) for _ in range(LAYERS)] for _ in range(2))
    return SharedBlocks(KVLayers(k, v), PAGE, 2 * PAGES)


@contextmanager
def no_wait_for_the_device() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def selection_of(lists: list[list[int]], used: list[int]) -> PageSelection:
    blocks = torch.full((LISTS, RANKED), EMPTY, dtype=torch.int32)
    for own, pages in zip(blocks, lists, strict=True):
        own[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    counts = torch.tensor(used, dtype=torch.int32)
    return PageSelection(blocks.view(LAYERS, HEADS, RANKED), counts.view(LAYERS, HEADS))


def told(shared_blocks: SharedBlocks) -> dict[int, int]:
    """The shared block of each page, layer and head that is in one; both tables say the same."""
    of = {
        entry: shared_block
        for entry, shared_block in enumerate(shared_blocks.of.tolist())
        if shared_block >= 0
    }
    held = {
        entry: shared_block for shared_block, entry in enumerate(shared_blocks.held.tolist()) if entry >= 0
    }
    assert of == held
    return of


def moved(moves: SharedMoves) -> list[tuple[int, int]]:
    n = int(moves.n_moves)
    return list(zip(moves.entries[:n].tolist(), moves.shared_blocks[:n].tolist(), strict=True))


class Model:
    """One request's shared blocks, as a dict."""

    def __init__(self, host: list[int], resident_blocks: list[int]) -> None:
        self.host = host
        self.own = [page * LISTS + i for page in resident_blocks for i in range(LISTS)]
        self.used = dict.fromkeys(self.own, 0)
        self.held: dict[int, int] = {}  # page, layer and head: its shared block
        self.named: dict[int, int] = {}
        self.selections = 0

    def assign(self, lists: list[list[int]], used: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return what is loaded where, and the tally."""
        self.selections += 1
        worth = [
            (rank * 1024 // max(1, used[i]), rank, i, page)
            for i, pages in enumerate(lists)
            for rank, page in enumerate(pages)
            if 0 <= page < PAGES
        ]
        named = [(page, i) for _, _, i, page in sorted(worth)[: len(self.own)]]
        entries = [self.host[page] * LISTS + i for page, i in named]
        missing = [entry for entry in entries if entry not in self.held]
        for entry in entries:
            if entry in self.held:
                self.used[self.held[entry]] = self.selections
        victims = sorted(
            self.own, key=lambda shared_block: (self.used[shared_block], self.own.index(shared_block))
        )
        loads = list(zip(missing, victims, strict=False))
        gone = {shared_block for _, shared_block in loads}
        self.held = {
            entry: shared_block for entry, shared_block in self.held.items() if shared_block not in gone
        }
        for _, shared_block in loads:
            self.used[shared_block] = self.selections
        for page, i in named[: CHOICE * LISTS]:
            self.named[page * LISTS + i] = self.selections
        recent = sum(number > max(0, self.selections - RECENT) for number in self.named.values())
        return loads, [len(entries) - len(missing), len(missing), 0, recent]


def test_shared_blocks_follow_a_dict_over_all_layers_and_heads() -> None:
    draw = np.random.default_rng(5)
    shared_blocks, everything = some_shared_blocks(), {}
    hosts = draw.permutation(2 * PAGES).reshape(2, PAGES)
    pages = draw.permutation(np.arange(1, POOL))[:12].reshape(2, 6)
    rows = []
    for host, resident_blocks in zip(hosts.tolist(), pages.tolist(), strict=True):
        tensors = torch.tensor(host, dtype=torch.int32), torch.tensor(resident_blocks, dtype=torch.int32)
        rows.append(
            (
                SharedTable(shared_blocks, len(resident_blocks), PAGES, CHOICE),
                Model(host, resident_blocks),
                *tensors,
            )
        )
    full = 0
    for step in range(300):
        table, model, host, resident_blocks = rows[step % 2]
        lists = [
            draw.permutation(PAGES + 3)[: draw.integers(1, RANKED + 1)].tolist() for _ in range(LISTS)
        ]  # some name pages behind the prompt's
        used = draw.integers(0, 6, LISTS).tolist()
        if step % 20 > 16:  # few heads need much
            lists = [own if i < 2 else own[:1] for i, own in enumerate(lists)]
        moves = table.assign(selection_of(lists, used), host, resident_blocks)
        loads, tally = model.assign(lists, used)
        assert moved(moves) == loads
        assert moves.tally.tolist() == tally
        assert table.tallied(moves.tally)[3:] == (tally[3], -(-tally[3] // LISTS))
        everything[step % 2] = model.held
        there = {entry: shared_block for held in everything.values() for entry, shared_block in held.items()}
        assert told(shared_blocks) == there, "what is overwritten is not looked up, nor what is on its way"
        table.arrive()
        model.held |= dict(loads)
        assert told(shared_blocks) == there | dict(loads)
        full += len(model.held) == len(model.own)
    assert full > 200, "all shared blocks are in use, whichever layers and heads need them"
    table, model, _, resident_blocks = rows[0]
    table.drop(resident_blocks)
    shared_blocks.settle()
    assert told(shared_blocks) == rows[1][1].held
    assert not shared_blocks.used[shared_blocks.within(resident_blocks)].any()


def test_shared_blocks_that_attention_fills_follow_the_same_dict() -> None:
    """Of two requests in turn, which end and begin again while shared blocks are still to be filled."""
    draw = np.random.default_rng(8)
    shared_blocks, held = some_shared_blocks(), {0: dict[int, int](), 1: dict[int, int]()}
    hosts, pages = draw.permutation(2 * PAGES).reshape(2, PAGES), np.arange(1, 13).reshape(2, 6)
    tensors = [
        (torch.tensor(a, dtype=torch.int32), torch.tensor(b, dtype=torch.int32))
        for a, b in zip(hosts, pages, strict=True)
    ]
    rows = [
        (SharedTable(shared_blocks, 6, PAGES, CHOICE), Model(hosts[i].tolist(), pages[i].tolist()))
        for i in range(2)
    ]
    for step in range(200):
        which = step % 2
        table, model = rows[which]
        host, resident_blocks = tensors[which]
        lists = [draw.permutation(PAGES)[: draw.integers(1, RANKED + 1)].tolist() for _ in range(LISTS)]
        used = draw.integers(0, 6, LISTS).tolist()
        moves = table.assign(selection_of(lists, used), host, resident_blocks)
        loads, tally = model.assign(lists, used)
        assert moved(moves) == loads
        table.expect()
        with pytest.raises(IntegrityError, match="to be filled"):
            table.arrive()
        filled = [draw.random() < 0.5 for _ in loads]
        for (entry, shared_block), is_filled in zip(loads, filled, strict=True):
            assert int(shared_blocks.of[entry]) == -2 - shared_block
            if is_filled:
                shared_blocks.of[entry] = shared_block
        held[which] = model.held | dict(each for each, there in zip(loads, filled, strict=True) if there)
        if draw.random() < 0.1:  # it ends
            table.drop(resident_blocks)
            shared_blocks.settle()
            held[which] = {}
            rows[which] = (
                SharedTable(shared_blocks, 6, PAGES, CHOICE),
                Model(model.host, pages[which].tolist()),
            )
        else:
            rest = table.rest()
            assert rest is not None
            assert moved(rest) == [each for each, there in zip(loads, filled, strict=True) if not there]
            assert table.filled(rest.tally) == sum(filled)
            assert table.tallied(rest.tally)[:2] == (tally[0], tally[1] - sum(filled))
            assert table.rest() is None
            assert told(shared_blocks) == held[0] | held[1]
            table.arrive()
            model.held |= dict(loads)
            held[which] = model.held
        assert told(shared_blocks) == held[0] | held[1]


def test_a_head_that_needs_much_takes_what_others_leave() -> None:
    shared_blocks = some_shared_blocks()
    table = SharedTable(shared_blocks, 2, PAGES, 1)
    numbers, resident_blocks = torch.arange(PAGES, dtype=torch.int32), torch.tensor([3, 7], dtype=torch.int32)
    lists = [[1], [2], [3], [4], [5], list(range(RANKED))]
    found = moved(table.assign(selection_of(lists, [1] * 5 + [8]), numbers, resident_blocks))
    assert len(found) == 2 * LISTS
    assert sorted(shared_block for _, shared_block in found) == sorted(
        shared_blocks.within(resident_blocks).tolist()
    )
    assert sorted(entry // LISTS for entry, _ in found if entry % LISTS == 5) == list(range(7))


def test_resident_blocks_that_go_are_forgotten_when_they_are_dropped() -> None:
    shared_blocks = some_shared_blocks()
    table = SharedTable(shared_blocks, 3, PAGES, 1)
    numbers, resident_blocks = (
        torch.arange(PAGES, dtype=torch.int32),
        torch.tensor([3, 7, 9], dtype=torch.int32),
    )
    lists = [[1, 2, 3]] * LISTS
    table.assign(selection_of(lists, [3] * LISTS), numbers, resident_blocks)
    table.resize(2)
    table.arrive()
    assert len(told(shared_blocks)) == 3 * LISTS
    table.drop(resident_blocks[2:])
    assert len(told(shared_blocks)) == 3 * LISTS, "a step may be on its way that reads them"
    shared_blocks.settle()
    assert len(told(shared_blocks)) == 2 * LISTS
    again = moved(table.assign(selection_of(lists, [3] * LISTS), numbers, resident_blocks[:2]))
    assert not again, "as many as there are shared blocks for, and these are there"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same_goes_where_without_waiting_for_it() -> None:
    draw = np.random.default_rng(6)
    device, hosts = torch.device("cuda"), torch.arange(PAGES, dtype=torch.int32)
    resident_blocks = torch.tensor([2, 5, 11, 4], dtype=torch.int32)
    here, there = some_shared_blocks(), some_shared_blocks(device=device)
    tables = [SharedTable(each, 4, PAGES, CHOICE) for each in (here, there)]
    on_device = hosts.to(device), resident_blocks.to(device)
    selections = [
        selection_of(
            [draw.permutation(PAGES)[:RANKED].tolist() for _ in range(LISTS)],
            draw.integers(0, 6, LISTS).tolist(),
        )
        for _ in range(40)
    ]
    moved_selections = [PageSelection(*(each.to(device) for each in selection)) for selection in selections]
    torch.cuda.synchronize()
    for selection, same in zip(selections, moved_selections, strict=True):
        want = tables[0].assign(selection, hosts, resident_blocks)
        tables[0].arrive()
        with no_wait_for_the_device():
            got = tables[1].assign(same, *on_device)
            tables[1].arrive()
        for mine, other in zip(got, want, strict=True):
            assert torch.equal(mine.cpu(), other)
        assert torch.equal(there.of.cpu(), here.of)
        assert torch.equal(there.held.cpu(), here.held)
    there.drop(on_device[1])
    with no_wait_for_the_device():
        there.settle()
    assert not told(there)


def test_numbers_of_32_bits_bound_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading_shared_blocks, "_LARGEST", 2 * PAGES * LISTS)
    with pytest.raises(ValueError, match="too many"):
        some_shared_blocks()
