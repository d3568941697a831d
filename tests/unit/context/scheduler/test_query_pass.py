"""SamKV's query pass: the same queries whether the pool has room for what the question looks at or not, and
no slot lost.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.context.compose.gather import Gather
from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice
from sglang_ext.context.recompute import recompute_pass
from sglang_ext.context.scheduler import query_pass
from sglang_ext.context.scheduler.query_pass import QueryPass
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.tensors.buffers import PADDING_SLOT
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan, Span
from tests.unit.context.composed_cases import NO_PAGES
from tests.unit.context.small_model import DIM, HEADS, KV_HEADS, LAYERS, runner_of

SLOTS, QUESTION = 200, 3


class Allocator:
    page_size = 16

    def __init__(self, free: list[int]) -> None:
        self.free_slots = free

    def alloc(self, count: int) -> torch.Tensor | None:
        assert count % self.page_size == 0
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken)

    def free(self, slots: torch.Tensor) -> None:
        self.free_slots += slots.tolist()


@pytest.mark.parametrize("ask", ["last", "mean"])
def test_where_the_pool_is_full_the_pass_runs_beside_it(ask: str) -> None:
    runner = runner_of(SLOTS)
    rotation = Rotation(torch.rand(DIM // 2), DIM, neox=True)
    gather = Gather(runner.token_to_kv_pool, rotation, NO_PAGES)
    composer: Any = SimpleNamespace(gather=gather, graphs=None)
    contexts = []
    for length in (20, 33):
        plan = ContextPlan(
            "compose",
            "n",
            "samkv",
            (Span(0, 5), Span(5, 5 + length)),
            {"block_size": 4, "experimental": {"question_query": ask}},
        )
        ids = torch.randint(0, 50, (5 + length + QUESTION,)).tolist()
        context = ComposedContext(
            plan, array("q", ids), ("a", "b"), partial_selection(plan, ModelShape(LAYERS))
        )
        where = torch.randperm(60)
        context.located.sources = [
            DocumentOnDevice(where[:5], None),
            DocumentOnDevice(where[5 : 5 + length], None),
        ]
        contexts.append(context)
    full, roomy = Allocator(list(range(100, 110))), Allocator(list(range(100, 196)))
    beside, inside = (QueryPass(runner, composer, allocator)(contexts) for allocator in (full, roomy))
    for one, other in zip(beside, inside, strict=True):
        assert set(one) == {"last", ask}
        assert one[ask].shape == (LAYERS, HEADS, DIM)
        torch.testing.assert_close(one[ask], other[ask])
    assert not torch.equal(beside[0]["last"], beside[1]["last"])
    assert len(set(roomy.free_slots)) == 96


def test_a_pass_holds_no_more_kv_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = 2 * LAYERS * KV_HEADS * DIM * 4
    monkeypatch.setattr(query_pass, "_BYTES", 50 * token_bytes + token_bytes // 2)
    passes = QueryPass(runner_of(SLOTS), SimpleNamespace(graphs=None), None)  # type: ignore[arg-type]

    def waiting(*tokens: int) -> list[Any]:
        """Requests with so much KV each, their questions included."""
        partial = [SimpleNamespace(kept=range(n - QUESTION)) for n in tokens]
        return [SimpleNamespace(partial=each, question_tokens=QUESTION) for each in partial]

    requests = waiting(20, 30, 1 + QUESTION, 46, 200, 10)
    batches = list(passes.batches(requests))
    assert [len(batch) for batch in batches] == [2, 2, 1, 1]
    assert [request for batch in batches for request in batch] == requests
    assert list(passes.batches([])) == []


def test_warming_up_writes_to_the_padding_slot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_pass, "_WARM_ROWS", (24, 40))  # their number is for the kernel
    runner = runner_of(SLOTS)
    buffers = [*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer]
    before = [buffer.clone() for buffer in buffers]
    recompute_pass.warm(runner)
    for was, now in zip(before, buffers, strict=True):
        others = [slot for slot in range(SLOTS) if slot != PADDING_SLOT]
        assert torch.equal(was[others], now[others])
        assert now[PADDING_SLOT].isfinite().all(), "some attention kernels read it and multiply by zero"
