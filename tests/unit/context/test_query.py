"""SamKV's query pass: the same queries whether the pool has room for what the question looks at or not, and no slot lost."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.context.composer import ComposedContext, DeviceSource
from sglang_ext.context.gather import PADDING_SLOT, Buffers, Gather
from sglang_ext.context.query import QueryPass
from sglang_ext.context.recompute import warm
from sglang_ext.context.rope import Rotation
from sglang_ext.context.strategies import Shape, draft
from sglang_ext.protocol import ContextPlan, Span

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, SLOTS = 3, 4, 2, 8, 16, 200
QUESTION = 3


class Layer:
    """A decoder layer of attention alone."""

    def __init__(self, number: int) -> None:
        sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        self._projections = [torch.randn(HIDDEN, size) / 4 for size in sizes]
        self._out = torch.randn(HEADS * DIM, HIDDEN) / 4
        self._attention = SimpleNamespace(
            layer_id=number, scaling=DIM**-0.5,
            tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, tp_v_head_num=KV_HEADS, qk_head_dim=DIM, v_head_dim=DIM,
        )  # fmt: skip

    def __call__(self, positions: torch.Tensor, hidden: torch.Tensor, batch: Any, residual: Any) -> tuple[torch.Tensor, None]:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        q, k, v = (hidden @ projection for projection in self._projections)
        k, v = (part.view(-1, KV_HEADS, DIM) for part in (k + positions[:, None] / 100, v))
        return hidden + get_attn_backend().forward(q, k, v, self._attention, batch) @ self._out, None


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


def runner_of() -> Any:
    pool = Buffers(*([torch.randn(SLOTS, KV_HEADS, DIM) for _ in range(LAYERS)] for _ in "kv"))
    holder = SimpleNamespace(
        k_buffer=pool.k, v_buffer=pool.v, layer_num=LAYERS, get_key_buffer=pool.get_key_buffer, get_value_buffer=pool.get_value_buffer
    )
    embeddings = torch.randn(50, HIDDEN)
    model = SimpleNamespace(model=SimpleNamespace(layers=[Layer(number) for number in range(LAYERS)], embed_tokens=embeddings.__getitem__))
    return SimpleNamespace(token_to_kv_pool=holder, req_to_token_pool=None, tp_group=None, device="cpu", model=model)


@pytest.mark.parametrize("ask", ["last", "mean"])
def test_where_the_pool_is_full_the_pass_runs_beside_it(ask: str) -> None:
    torch.manual_seed(0)
    runner = runner_of()
    rotation = Rotation(torch.rand(DIM // 2), DIM, neox=True)
    gather = Gather(runner.token_to_kv_pool, rotation, torch.empty(0, 2, LAYERS, KV_HEADS, 16, DIM), 16)
    composer: Any = SimpleNamespace(gather=gather, graphs=None)
    contexts = []
    for length in (20, 33):
        plan = ContextPlan("compose", "n", "samkv", (Span(0, 5), Span(5, 5 + length)), {"block_size": 4, "ask": ask})
        ids = torch.randint(0, 50, (5 + length + QUESTION,)).tolist()
        context = ComposedContext(plan, array("q", ids), ("a", "b"), draft(plan, Shape(LAYERS)))
        where = torch.randperm(60)
        context.sources = [DeviceSource(where[:5], None), DeviceSource(where[5 : 5 + length], None)]
        contexts.append(context)
    full, roomy = Allocator(list(range(100, 110))), Allocator(list(range(100, 196)))
    beside, inside = (QueryPass(runner, composer, allocator)(contexts) for allocator in (full, roomy))
    for one, other in zip(beside, inside, strict=True):
        assert set(one) == {"last", ask}
        assert one[ask].shape == (LAYERS, HEADS, DIM)
        torch.testing.assert_close(one[ask], other[ask])
    assert not torch.equal(beside[0]["last"], beside[1]["last"])
    assert len(set(roomy.free_slots)) == 96


def test_warming_up_writes_to_the_padding_slot_only() -> None:
    runner = runner_of()
    buffers = [*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer]
    before = [buffer.clone() for buffer in buffers]
    warm(runner)
    for was, now in zip(before, buffers, strict=True):
        others = [slot for slot in range(SLOTS) if slot != PADDING_SLOT]
        assert torch.equal(was[others], now[others])
        assert now[PADDING_SLOT].isfinite().all(), "some attention kernels read it and multiply by zero"
