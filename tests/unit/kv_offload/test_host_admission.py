"""An offloaded request that is retracted keeps its KV on the host, and goes on from there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_ext.kv_offload.host_admission import HostAdmission
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.versions import leave_tree, protected_tokens
from tests.unit.kv_offload.offloaded_bench import POOL, PROMPT, TAIL, Bench, drawn
from tests.unit.request_shapes import forget_prefix, prefix_of

TOKENS = (PROMPT + TAIL) * 16 - 6  # whose KV is kept: the next one is what `Bench.attend` ends with


class Adder:
    """SGLang's, with room for ``room`` tokens. ``add`` admits a request, refuses it or fails."""

    def __init__(self, room: int = 10**6, outcome: str = "admits") -> None:
        self.rem_total_tokens = room
        self.can_run_list: list[Any] = []
        self.outcome = outcome

    def add(self, req: Any) -> AddReqResult:
        if self.outcome == "fails":
            raise ValueError("no")
        if self.outcome == "admits":
            self.can_run_list.append(req)
        return AddReqResult.CONTINUE if self.outcome == "admits" else AddReqResult.OTHER


def retracted(bench: Bench, row: OffloadedRow) -> HostPrefix:
    """Take a request back, and let everything that it had on the device be someone else's."""
    req = bench.req
    prefix = HostPrefixes(bench.rows).retract(row, TOKENS)
    assert prefix is not None
    protected = protected_tokens(req)
    slots = bench.table[1, protected : (PROMPT + TAIL) * bench.page].long()
    if row.moved:
        held, tail = req.ragserve_resident_blocks
        slots = torch.cat((held, bench.table[1, tail : (PROMPT + TAIL) * bench.page].long()))
    bench.allocator.free(slots)
    leave_tree(bench.tree, req)
    bench.tree.evict(None)
    assert sorted(bench.allocator.pages) == list(range(1, POOL))
    bench.spoil_free_pages()
    bench.table[1] = 0
    assert bench.pages.used == PROMPT + TAIL
    bench.rows.check()
    forget_prefix(req)
    req.ragserve_resident_blocks = None
    req.output_ids = [0] * 9
    req.full_untruncated_fill_ids = [0] * (TOKENS + 1)
    req.sampling_params = SimpleNamespace(max_new_tokens=20)
    return prefix


def admitted(bench: Bench, prefix: HostPrefix, adder: Adder) -> tuple[Any, OffloadedRow | None]:
    return HostAdmission(bench.rows, bench.tree).admit(adder, prefix, lambda: adder.add(bench.req))


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "copied"])
def test_it_reads_what_it_would_have_read_and_nothing_is_lost(moved: bool) -> None:
    bench, selection = Bench(cached=7), drawn()
    row = bench.moved(selection)[0] if moved else bench.copied()
    prefix = retracted(bench, row)
    _, back = admitted(bench, prefix, Adder())
    assert back is not None
    shown = prefix_of(bench.req)
    assert len(shown) == TOKENS
    given = shown[protected_tokens(bench.req) :] // bench.page
    assert len(torch.unique(given)) == back.blocks.count + TAIL, "resident_blocks and what follows the prompt"
    last = shown[-1] // bench.page * bench.page  # whose rest the extend writes
    slots = torch.cat((shown, last + torch.arange(10, 16)))
    bench.table[1, : len(slots)] = slots.int()
    HostPrefixes(bench.rows).enter(back, 1, prefix.tail)
    assert bench.pages.used == PROMPT
    end = TOKENS // bench.page * bench.page + TOKENS % bench.page
    for kept, was in zip((*bench.kv.k, *bench.kv.v), (*bench.original.k, *bench.original.v), strict=True):
        old, new = (row[PROMPT * 16 : end].long() for row in (bench.row_before, bench.table[1]))
        assert torch.equal(kept[new], was[old])
        written = bench.row_before[end : end + 1].long()
        kept[bench.table[1, end : end + 1].long()] = was[written]  # by its first pass
    placed = bench.rows.load(back, selection)
    assert bench.arrives(back, placed)
    bench.attends(selection, placed)
    bench.rows.check()
    bench.ended(back)


@pytest.mark.parametrize("outcome", ["full", "refuses", "fails"])
def test_without_room_it_waits_and_its_host_pages_wait_with_it(outcome: str) -> None:
    bench = Bench()
    prefix = retracted(bench, bench.moved(drawn())[0])
    free = bench.allocator.available_size()
    adder = Adder(room=100 if outcome == "full" else 10**6, outcome=outcome)
    if outcome == "fails":
        with pytest.raises(ValueError, match="no"):
            admitted(bench, prefix, adder)
    else:
        expected = AddReqResult.NO_TOKEN if outcome == "full" else AddReqResult.OTHER
        assert admitted(bench, prefix, adder) == (expected, None)
    assert bench.allocator.available_size() == free
    assert len(prefix_of(bench.req)) == protected_tokens(bench.req) == 0
    assert bench.req.ragserve_resident_blocks is None
    assert list(bench.rows.waiting.values()) == [prefix]
    bench.rows.check()
    admission = HostAdmission(bench.rows, bench.tree)
    admission.drop_gone([bench.req])
    assert bench.pages.used == PROMPT + TAIL
    admission.drop_gone([])
    assert bench.pages.used == 0, "it left the queue"
    bench.rows.check()


def test_without_host_pages_for_what_follows_the_prompt_nothing_is_kept() -> None:
    bench = Bench(host=PROMPT + TAIL - 1)
    row, _ = bench.moved(drawn())
    assert HostPrefixes(bench.rows).retract(row, TOKENS) is None
    assert bench.pages.used == 0
    begun = Bench()
    assert HostPrefixes(begun.rows).retract(begun.begun(), TOKENS) is None, "not copied yet"
    assert begun.pages.used == 0
    begun.rows.check()
