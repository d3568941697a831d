"""Resident blocks are replaced as a dict in order of use says, and what the selection before reads is
overwritten late.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch

from ragserve_kernels.paged import PageSelection
from ragserve_kernels.resident_assign import ResidentBlocks
from sglang_ext.kv_offload.resident.resident_blocks import COVERED, EMPTY, RECENT, ResidentTable
from tests.conftest import EXHAUSTIVE

LAYERS, HEADS, CHOSEN, PAGES = 8, 25, 4, 14
LISTS = range(LAYERS * HEADS)
CHOICES = 250 if EXHAUSTIVE else 60  # of 200 layers and heads


def assigned(table: ResidentTable, wanted: torch.Tensor) -> ResidentBlocks:
    """Assign a selection; loads are by numbers of pages and resident blocks. Negative entries of ``wanted``
    are none.
    """
    counts = torch.full(wanted.shape[:2], wanted.shape[2], dtype=torch.int32)
    numbers = torch.arange(PAGES, dtype=torch.int32)
    return table.assign(PageSelection(wanted, counts), numbers, numbers)


def said(pages_of: torch.Tensor, resident_blocks_of: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Return pages and resident blocks of each layer and head, and check that what is none comes last."""
    found = []
    for pages, targets in zip(
        pages_of.view(-1, CHOSEN).tolist(), resident_blocks_of.view(-1, CHOSEN).tolist(), strict=True
    ):
        both = list(zip(pages, targets, strict=True))
        count = sum(page >= 0 for page in pages)
        assert both[count:] == [(EMPTY, EMPTY)] * (CHOSEN - count)
        found.append(both[:count])
    return found


@pytest.mark.parametrize("changes", [False, True], ids=["two-for-each-page", "few-and-changing"])
def test_resident_blocks_follow_a_dict_in_order_of_use(changes: bool) -> None:
    draw = np.random.default_rng(7)
    resident_blocks = 2 * CHOSEN
    table = ResidentTable(LAYERS, HEADS, resident_blocks, PAGES, torch.device("cpu"))
    models: list[dict[int, int]] = [{} for _ in LISTS]  # page: its resident block, least recently used first
    before: list[list[int]] = [[] for _ in LISTS]
    latest: list[deque[list[int]]] = [deque(maxlen=RECENT) for _ in LISTS]
    were_late = 0
    for step in range(CHOICES):
        if changes and step % 9 == 5:
            resident_blocks = int(draw.integers(CHOSEN, 11))
            table.resize(resident_blocks)
            models = [{page: at for page, at in own.items() if at < resident_blocks} for own in models]
        wanted = np.argsort(draw.random((LAYERS * HEADS, PAGES)), axis=1)[:, :CHOSEN].astype(np.int32)
        wanted[draw.random(wanted.shape) < 0.2] = -1  # pages that no resident block is for
        held = table.held.clone()
        found = assigned(table, torch.from_numpy(wanted.reshape(LAYERS, HEADS, CHOSEN)))
        loads, late = said(found.source, found.target), said(found.late_pages, found.late_resident_blocks)
        placed = found.placed.view(-1, CHOSEN).tolist()
        hits = misses = 0
        for i, selection in enumerate(wanted.tolist()):
            model, named = models[i], [page for page in selection if page >= 0]
            missed = [page for page in named if page not in model]
            taken = set(model.values()) if missed else ()
            free = [at for at in range(resident_blocks) if at not in taken]
            victims = [page for page in model if page not in named]
            for page in named:
                if page in model:
                    model[page] = model.pop(page)
            at_once, later = [], []
            for page in missed:
                if free:
                    at_once.append((page, free.pop(0)))
                    continue
                victim = victims.pop(0)
                (later if victim in before[i] else at_once).append((page, model.pop(victim)))
            for page, resident_block in (*at_once, *later):
                model[page] = resident_block
            assert placed[i] == [PAGES - 1 - model[page] if page >= 0 else EMPTY for page in selection]
            assert (loads[i], late[i]) == (at_once, later)
            for page in sorted(named, key=lambda page: model[page]):  # named together, so by number
                model[page] = model.pop(page)
            before[i] = named
            latest[i].append(named)
            hits, misses = hits + len(named) - len(missed), misses + len(missed)
        were_late += sum(map(len, late))
        sets = sorted(len({page for each in own for page in each}) for own in latest)
        covering = sets[math.ceil(COVERED * len(sets)) - 1]
        assert table.tallied(found.tally) == (hits, misses, sum(map(len, late)), sum(sets), covering)
        told = table.held.view(-1, resident_blocks)
        for i, own in enumerate(late):
            for _, resident_block in own:
                assert told[i, resident_block] == held.view(-1, resident_blocks)[i, resident_block], (
                    "it is there as long as it is read"
                )
        table.settle(found)
    assert (were_late > 0) is changes, "with two resident blocks for each page nothing is late"
    told = table.held.view(-1, resident_blocks).tolist()
    assert all(told[i][resident_block] == page for i in LISTS for page, resident_block in models[i].items())


def test_what_is_late_for_a_forgotten_resident_block_is_forgotten_with_it() -> None:
    table = ResidentTable(1, 1, 2, PAGES, torch.device("cpu"))
    for selection in ([0, 1], [2, 3]):
        found = assigned(table, torch.tensor([[selection]], dtype=torch.int32))
    assert found.late_resident_blocks.tolist() == [[[0, 1]]]
    table.resize(1)
    table.settle(found)
    assert table.held.tolist() == [[[2]]]
