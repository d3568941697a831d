"""An offloaded request reads the KV it would read on the device, whatever its resident blocks and old pages
hold, and gives back everything wherever it ends."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragserve_kernels.page_stats import PageStats
from ragserve_kernels.paged import PageSelection
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload import offloaded_rows
from sglang_ext.kv_offload.resident.resident_blocks import RECENT
from sglang_ext.kv_offload.resident.shared_blocks import SharedTable
from sglang_ext.versions import protected_tokens
from sglang_ext.wire.protocol import OffloadCounts
from tests.unit.kv_offload.offloaded_bench import HEADS, LAYERS, LIMIT, PROMPT, Bench, drawn


def offloaded_pages(selection: PageSelection) -> int:
    return int((selection.blocks[..., :LIMIT] < PROMPT).sum())


@pytest.mark.parametrize(("resident_blocks", "page"), [(2, 16), (1, 16), (2, 64)])
def test_what_is_read_is_what_the_device_would_hold_and_nothing_else_is_read(
    resident_blocks: int, page: int
) -> None:
    bench = Bench(resident_blocks=resident_blocks, page=page)
    selection = drawn()
    named = offloaded_pages(selection)
    row, placed = bench.moved(selection)
    bench.tree.evict(None)  # the prompt goes; its pages get other KV
    bench.spoil_free_pages()
    for _ in range(40 if page == 16 else 8):
        bench.attends(selection, placed)
        selection_after = drawn()
        named += offloaded_pages(selection_after)
        placed_after = bench.rows.load(row, selection_after)
        bench.attends(selection, placed)  # loads leave alone what the steps beside them read
        bench.rows.check()
        assert bench.arrives(row, placed_after)
        bench.rows.check()
        selection, placed = selection_after, placed_after
    counts = row.counts
    assert (counts.hits + counts.misses, counts.misses * row.head_bytes) == (named, counts.loaded_bytes)
    assert counts.hits > 0
    assert LIMIT - 1 < counts.working_set <= PROMPT
    bench.ended(row)


def test_statistics_of_the_prompt_are_kept_behind_those_of_the_pool() -> None:
    bench = Bench()
    row, _ = bench.moved(drawn())
    where = bench.rows.statistics_of[1]
    assert (where[PROMPT:] == -1).all()
    old = bench.row_before[:: bench.page][:PROMPT] // bench.page
    for table in (bench.statistics.k_min, bench.statistics.k_max):
        kept, was = (table[:, bench.statistics.rows(pages)] for pages in (where[:PROMPT], old))
        assert torch.equal(kept, was)
    centers = bench.statistics.k_center
    assert torch.equal(centers[:, where[:PROMPT].long()], centers[:, old.long()])
    bench.ended(row)
    assert (bench.rows.statistics_of == -1).all()


@pytest.mark.parametrize("cached", [PROMPT, 7, 0])
@pytest.mark.parametrize(
    "stage",
    ["begun", "copied", "reserved", "loaded", "moving", "moved", "grown", "late", "leaving", "left"],
)
def test_a_request_that_ends_at_any_stage_gives_everything_back(stage: str, cached: int) -> None:
    bench = Bench(cached, resident_blocks=0)
    free = bench.allocator.available_size()
    if stage in ("grown", "late", "leaving", "left"):
        row, _ = bench.moved(drawn())
        assert row.blocks.table is not None
        row.loads.largest_set = 3 * LIMIT if stage == "grown" else 1
        row.blocks.table.selections = RECENT + 1
        bench.rows.resize([row], others_wait=False)
        assert row.blocks.count == (3 * LIMIT if stage == "grown" else LIMIT)
        if stage != "grown":
            placed = bench.rows.load(row, drawn())
            assert row.loads.late is not None
        if stage == "left":
            assert bench.arrives(row, placed)
            bench.rows.before_schedule(lambda row: False)
        bench.counted(row)
    elif stage == "moved":
        row, _ = bench.moved(drawn())
        assert bench.allocator.available_size() == free + ((PROMPT - cached) - 2 * LIMIT) * bench.page
        assert bench.tree.locks == 0, "the prompt may be evicted"
    else:
        row = bench.begun() if stage == "begun" else bench.copied()
        if stage in ("reserved", "loaded", "moving"):
            bench.rows.before_schedule(lambda row: False)
            assert bench.allocator.available_size() == free - 2 * LIMIT * bench.page
            assert protected_tokens(bench.req) == (cached - 2 * LIMIT) * bench.page, (
                "SGLang counts the resident_blocks"
            )
        if stage in ("loaded", "moving"):
            bench.rows.load(row, drawn())
        if stage == "moving":
            bench.rows.before_schedule(lambda row: True)
            assert row.moved
    bench.ended(row)


def test_a_prompt_that_waits_for_room_takes_nothing_from_the_cache_before_it_fits() -> None:
    bench = Bench(cached=0)
    row = bench.copied()
    bench.tree.cached = bench.allocator.alloc(2 * bench.page)  # others' KV
    rest = bench.allocator.alloc(bench.allocator.available_size())
    assert rest is not None
    short = (2 * LIMIT - 2) * bench.page
    bench.allocator.free(rest[: short - bench.page])
    bench.rows.before_schedule(lambda row: False)
    assert (row.blocks.slots, bench.tree.evictable_size()) == (None, 2 * bench.page)
    bench.allocator.free(rest[short - bench.page : short])
    bench.rows.before_schedule(lambda row: False)
    assert (row.blocks.slots is None, bench.tree.evictable_size()) == (False, 0)
    bench.allocator.free(rest[short:])
    bench.ended(row)


def no_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("cached", [PROMPT, 7, 0])
def test_a_request_that_fails_on_its_way_in_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    bench = Bench(cached)
    with monkeypatch.context() as patch:
        patch.setattr(PageStats, "copy", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            bench.begun()
    bench.rows.check()
    row = bench.copied()
    monkeypatch.setattr(offloaded_rows, "ResidentTable", no_memory)
    bench.rows.before_schedule(lambda row: False)
    assert "out of memory at stage 'offloading'" in bench.req.to_finish.message
    bench.rows.before_schedule(lambda row: True)
    bench.ended(row)


class Copies:
    """Copies whose events are numbers, and of those the ones that forward passes have followed."""

    def __init__(self, device: torch.device) -> None:
        self.events: list[SimpleNamespace] = []
        self.awaited: list[SimpleNamespace] = []

    def behind(self, *used: torch.Tensor) -> nullcontext[None]:
        return nullcontext()

    def event(self) -> SimpleNamespace:
        self.events.append(SimpleNamespace(query=lambda: True, elapsed_time=lambda end: 1.0))
        return self.events[-1]

    def await_on_current(self, event: SimpleNamespace | None, *made: torch.Tensor) -> None:
        if event is not None:
            self.awaited.append(event)

    def synchronize(self) -> None: ...


def test_a_pass_that_may_write_to_a_prompts_old_slots_follows_the_copies_that_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offloaded_rows, "CopyStream", Copies)
    bench = Bench()
    row = bench.copied()
    bench.rows.before_schedule(lambda row: False)
    bench.rows.load(row, drawn())
    bench.rows.join()
    copies = bench.rows.copies
    assert not copies.awaited, "the prompt is still the request's own"
    bench.rows.before_schedule(lambda row: True)
    bench.rows.join()
    assert copies.awaited == copies.events[1:], "the load, and not what comes before it"
    bench.ended(row)


def test_without_room_on_the_device_or_the_host_a_prompt_stays_where_it_is() -> None:
    bench = Bench(host=PROMPT - 1)
    assert bench.rows.begin(bench.req, PROMPT * bench.page + 1, LIMIT, 2, OffloadCounts()) is None
    bench = Bench()
    assert bench.rows.begin(bench.req, 2 * LIMIT * bench.page + 1, LIMIT, 2, OffloadCounts()) is None, (
        "its resident blocks would take as much"
    )
    row = bench.copied()
    taken = bench.allocator.alloc(bench.allocator.available_size() - bench.page)
    assert taken is not None
    selection = drawn()
    bench.rows.before_schedule(lambda row: True)
    assert bench.rows.load(row, selection) is selection
    assert bench.arrives(row, selection), "it reads its prompt"
    bench.allocator.free(taken)
    bench.rows.before_schedule(lambda row: False)
    assert row.blocks.slots is not None, "it asks again"
    bench.ended(row)


def test_a_resident_block_that_was_overwritten_is_found() -> None:
    bench = Bench()
    _, placed = bench.moved(drawn())
    page = int(bench.table[1, int(placed.blocks[1, 0, 0]) * bench.page]) // bench.page
    bench.kv.v[1][page * bench.page + 3, 0, 5] += 1
    with pytest.raises(IntegrityError, match="1 resident blocks of request r differ"):
        bench.rows.check()
    bench.kv.v[1][page * bench.page + 3, 0, 5] -= 1


def ranked() -> PageSelection:
    """All pages but the tail's, in an order for each layer and head; the first one attends to few."""
    blocks = torch.rand(LAYERS, HEADS, PROMPT).argsort(-1).int()
    return PageSelection(blocks, torch.tensor([[1, 9], [6, PROMPT]], dtype=torch.int32))


def test_shared_resident_blocks_hold_what_the_host_does_whatever_is_loaded() -> None:
    bench = Bench(resident_blocks=0, shared=True)
    row, _ = bench.moved(ranked())
    assert isinstance(row.blocks.table, SharedTable)
    bench.tree.evict(None)
    bench.spoil_free_pages()
    of, shared_blocks = bench.rows.shared_blocks.places.of, 2 * LIMIT * LAYERS * HEADS
    for step in range(30):
        assert int((of >= 0).sum()) == shared_blocks
        selection = ranked()
        selection = bench.rows.load(row, selection)
        assert int((of >= 0).sum()) < shared_blocks, "nobody looks for what is overwritten"
        bench.rows.check()
        assert bench.arrives(row, selection)
        bench.rows.check()
        if step % 10 == 5:
            row.loads.largest_set, row.blocks.table.selections = LIMIT + step // 2, RECENT + 1
            bench.rows.resize([row], others_wait=False)
            shared_blocks = (LIMIT + step // 2) * LAYERS * HEADS
            while row.blocks.leaving:
                assert bench.arrives(row, bench.rows.load(row, ranked()))
                bench.rows.before_schedule(lambda row: False)
            bench.spoil_free_pages()
            bench.rows.join()
            assert bench.arrives(row, bench.rows.load(row, ranked()))
            bench.counted(row)
    assert row.counts.hits > 0
    assert 0 < row.counts.working_set <= PROMPT
    bench.ended(row)
    bench.rows.join()
    assert (of == -1).all()


@pytest.mark.parametrize("stage", ["loaded", "moving", "moved", "on its way", "leaving"])
def test_a_request_with_shared_resident_blocks_that_ends_at_any_stage_leaves_nothing_behind(
    stage: str,
) -> None:
    bench = Bench(resident_blocks=0, shared=True)
    if stage in ("loaded", "moving"):
        row = bench.copied()
        bench.rows.before_schedule(lambda row: False)
        bench.rows.load(row, ranked())
        if stage == "moving":
            bench.rows.before_schedule(lambda row: True)
            assert row.moved
    else:
        row, _ = bench.moved(ranked())
        assert row.blocks.table is not None
        if stage != "moved":
            bench.rows.load(row, ranked())
        if stage == "leaving":
            row.collect()
            row.loads.largest_set, row.blocks.table.selections = 1, RECENT + 1
            bench.rows.resize([row], others_wait=False)
            assert row.blocks.leaving == LIMIT
    bench.ended(row)
    bench.rows.join()
    assert (bench.rows.shared_blocks.of == -1).all()
    assert (bench.rows.shared_blocks.held == -1).all()


def test_a_shared_block_that_was_overwritten_or_is_misplaced_is_found() -> None:
    bench = Bench(shared=True)
    row, _ = bench.moved(ranked())
    shared_block = int(bench.rows.shared_blocks.places.of[row.numbers].max())
    buffer = bench.kv.v[shared_block // HEADS % LAYERS]
    place = shared_block // (LAYERS * HEADS) * bench.page + 3, shared_block % HEADS, 5
    buffer[place] += 1
    with pytest.raises(IntegrityError, match="1 resident blocks of request r differ"):
        bench.rows.check()
    buffer[place] -= 1
    bench.rows.shared_blocks.of[int(bench.rows.shared_blocks.held[shared_block])] = -1
    with pytest.raises(IntegrityError, match="2 resident blocks of request r differ"):
        bench.rows.check()
