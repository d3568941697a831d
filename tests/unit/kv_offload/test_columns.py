"""Columns give way as a dict in order of use says, and what the choice before reads is overwritten late."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch

from ragserve_kernels.column_assign import Columns
from ragserve_kernels.paged import PageSelection
from sglang_ext.kv_offload.resident.columns import COVERED, EMPTY, RECENT, ColumnTable
from tests.conftest import EXHAUSTIVE

LAYERS, HEADS, CHOSEN, PAGES = 8, 25, 4, 14
LISTS = range(LAYERS * HEADS)
CHOICES = 250 if EXHAUSTIVE else 60  # of 200 layers and heads


def assigned(table: ColumnTable, wanted: torch.Tensor) -> Columns:
    """Assign a choice; loads are by numbers of pages and columns. Negative entries of ``wanted`` are none."""
    counts = torch.full(wanted.shape[:2], wanted.shape[2], dtype=torch.int32)
    numbers = torch.arange(PAGES, dtype=torch.int32)
    return table.assign(PageSelection(wanted, counts), numbers, numbers)


def said(pages_of: torch.Tensor, columns_of: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Return pages and columns of each layer and head, and check that what is none comes last."""
    found = []
    for pages, targets in zip(
        pages_of.view(-1, CHOSEN).tolist(), columns_of.view(-1, CHOSEN).tolist(), strict=True
    ):
        both = list(zip(pages, targets, strict=True))
        count = sum(page >= 0 for page in pages)
        assert both[count:] == [(EMPTY, EMPTY)] * (CHOSEN - count)
        found.append(both[:count])
    return found


@pytest.mark.parametrize("changes", [False, True], ids=["two-for-each-page", "few-and-changing"])
def test_columns_follow_a_dict_in_order_of_use(changes: bool) -> None:
    draw = np.random.default_rng(7)
    columns = 2 * CHOSEN
    table = ColumnTable(LAYERS, HEADS, columns, PAGES, torch.device("cpu"))
    models: list[dict[int, int]] = [{} for _ in LISTS]  # page: its column, least recently used first
    before: list[list[int]] = [[] for _ in LISTS]
    latest: list[deque[list[int]]] = [deque(maxlen=RECENT) for _ in LISTS]
    were_late = 0
    for step in range(CHOICES):
        if changes and step % 9 == 5:
            columns = int(draw.integers(CHOSEN, 11))
            table.resize(columns)
            models = [{page: at for page, at in own.items() if at < columns} for own in models]
        wanted = np.argsort(draw.random((LAYERS * HEADS, PAGES)), axis=1)[:, :CHOSEN].astype(np.int32)
        wanted[draw.random(wanted.shape) < 0.2] = -1  # pages that no column is for
        held = table.held.clone()
        found = assigned(table, torch.from_numpy(wanted.reshape(LAYERS, HEADS, CHOSEN)))
        loads, late = said(found.source, found.target), said(found.late_pages, found.late_columns)
        placed = found.placed.view(-1, CHOSEN).tolist()
        hits = misses = 0
        for i, choice in enumerate(wanted.tolist()):
            model, named = models[i], [page for page in choice if page >= 0]
            missed = [page for page in named if page not in model]
            taken = set(model.values()) if missed else ()
            free = [at for at in range(columns) if at not in taken]
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
            for page, column in (*at_once, *later):
                model[page] = column
            assert placed[i] == [PAGES - 1 - model[page] if page >= 0 else EMPTY for page in choice]
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
        told = table.held.view(-1, columns)
        for i, own in enumerate(late):
            for _, column in own:
                assert told[i, column] == held.view(-1, columns)[i, column], (
                    "it is there as long as it is read"
                )
        table.settle(found)
    assert (were_late > 0) is changes, "with two columns for each page nothing is late"
    told = table.held.view(-1, columns).tolist()
    assert all(told[i][column] == page for i in LISTS for page, column in models[i].items())


def test_what_is_late_for_a_forgotten_column_is_forgotten_with_it() -> None:
    table = ColumnTable(1, 1, 2, PAGES, torch.device("cpu"))
    for choice in ([0, 1], [2, 3]):
        found = assigned(table, torch.tensor([[choice]], dtype=torch.int32))
    assert found.late_columns.tolist() == [[[0, 1]]]
    table.resize(1)
    table.settle(found)
    assert table.held.tolist() == [[[2]]]
