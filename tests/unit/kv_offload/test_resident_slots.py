"""Resident blocks come and go with working sets, and what keeps requests from having any is told."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sglang_ext.kv_offload.resident.resident_blocks import RECENT, ResidentTable
from sglang_ext.kv_offload.resident.working_set import resized
from sglang_ext.wire.protocol import OffloadCounts
from tests.unit import request_shapes
from tests.unit.kv_offload.offloaded_bench import LIMIT, PROMPT, Bench, drawn


def test_resident_blocks_come_and_go_with_the_working_set_and_nothing_is_lost() -> None:
    """Random selections out of few pages, then out of many, with changes before every third of them."""
    draw = random.Random(5)
    bench = Bench(cached=7, resident_blocks=0)
    selection = drawn()
    row, placed = bench.moved(selection)
    sizes = {row.blocks.count}
    for step in range(60):
        others_wait = draw.random() < 0.2
        before = row.blocks.count
        if step % 3 == 0:
            bench.rows.resize([None, row], others_wait=others_wait)
            largest, blocks = row.loads.largest_set, row.blocks
            wanted = resized(before, largest, LIMIT, others_wait=others_wait, settled=step >= RECENT)
            assert blocks.count == (wanted if not blocks.leaving or before != blocks.count else before)
        bench.rows.before_schedule(lambda row: False)
        bench.counted(row)
        bench.spoil_free_pages()
        bench.attends(selection, placed)
        after = drawn(near=step // 20 % 2 == 0)
        placed_after = bench.rows.load(row, after)
        if step % 7 == 0:  # while one has been loaded and not read
            bench.rows.resize([row], others_wait=False)
            bench.counted(row)
        bench.attends(selection, placed)
        assert bench.arrives(row, placed_after)
        bench.rows.check()
        selection, placed = after, placed_after
        sizes.add(row.blocks.count)
    assert min(sizes) < 2 * LIMIT < max(sizes), sizes
    assert bench.allocator.segments > 0, "resident_blocks are given back without waiting for the device"
    bench.ended(row)


def test_the_next_forward_pass_of_any_kind_puts_resident_blocks_in_their_places() -> None:
    """A prefill may come first, and the cache may give the prompt's pages away meanwhile."""
    bench = Bench()
    row = bench.copied()
    bench.rows.before_schedule(lambda row: False)
    selection = drawn()
    placed = bench.rows.load(row, selection)
    bench.rows.before_schedule(lambda row: True)
    bench.tree.evict(None)
    bench.rows.join()
    bench.counted(row)
    assert bench.arrives(row, placed)
    bench.attends(selection, placed)
    bench.ended(row)


def test_without_room_it_keeps_the_resident_blocks_it_has() -> None:
    bench = Bench(resident_blocks=0)
    row, _ = bench.moved(drawn())
    row.loads.largest_set = 3 * LIMIT
    bench.tree.evict(None)
    taken = bench.allocator.alloc(bench.allocator.available_size())
    assert taken is not None
    bench.rows.resize([row], others_wait=False)
    assert row.blocks.count == 2 * LIMIT
    bench.allocator.free(taken)
    bench.rows.resize([row], others_wait=True)
    assert row.blocks.count == 2 * LIMIT, "others wait for that room"
    bench.rows.resize([row], others_wait=False)
    assert row.blocks.count == 3 * LIMIT
    bench.ended(row)


def test_a_request_that_fails_as_it_grows_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError

    bench = Bench(resident_blocks=0)
    row, _ = bench.moved(drawn())
    row.loads.largest_set = 3 * LIMIT
    monkeypatch.setattr(ResidentTable, "resize", no_memory)
    bench.rows.resize([row], others_wait=False)
    assert "out of memory at stage 'offloading'" in bench.req.to_finish.message
    assert row.blocks.count == 2 * LIMIT
    bench.ended(row)


def test_a_number_of_resident_blocks_that_was_asked_for_stays() -> None:
    bench = Bench(resident_blocks=3)
    row, _ = bench.moved(drawn())
    row.loads.largest_set = 5 * LIMIT
    bench.rows.resize([row], others_wait=False)
    assert row.blocks.count == 3 * LIMIT
    bench.ended(row)


def test_what_keeps_requests_from_being_offloaded_is_told() -> None:
    bench = Bench()
    rows = bench.rows
    rows.begin_step(0.0)
    row = bench.copied()
    assert rows.due_tokens == 2 * LIMIT * bench.page, "nobody else is to get this room"
    other: Any = request_shapes.request(row=2, rid="s")
    assert rows.begin(other, PROMPT * bench.page + 1, LIMIT, 2, OffloadCounts()) is None
    rows.bounds.share = 0.6
    rows.begin_step(0.1)
    assert rows.describe()["waiting"] == {"device": 1, "host": 0, "link": 0}
    rows.before_schedule(lambda row: False)
    assert rows.due_tokens == 0
    placed = rows.load(row, drawn())
    rows.before_schedule(lambda row: True)
    assert rows.arrive(row, placed)
    rows.begin_step(0.2)
    assert rows.begin(other, PROMPT * bench.page + 1, LIMIT, 2, OffloadCounts()) is None
    said = rows.describe()
    assert said["waiting"] == {"device": 0, "host": 0, "link": 1}, "two of them would take 1.2 of the link"
    assert (said["resident_blocks"], said["resident_blocks_due"]) == (2 * LIMIT, 0)
    rows.bounds.share = 0.4
    assert rows.begin(other, PROMPT * bench.page + 1, LIMIT, 2, OffloadCounts()) is None
    assert rows.describe()["waiting"]["host"] == 1
    bench.ended(row)
