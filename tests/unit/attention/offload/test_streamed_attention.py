"""A question reads a prompt on host pages as it would read it on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_ext.attention.offload import streamed_attention
from sglang_ext.attention.offload.streamed_attention import StreamedTokens
from sglang_ext.kv_offload.host.host_reader import HostReader
from tests.unit.kv_offload.offloaded_bench import DIM, HEADS, LAYERS, POOL, PROMPT, Bench

GROUP = 2


@pytest.mark.parametrize(("count", "behind"), [(1, 0), (7, 5), (40, 3)], ids=["one", "several", "pages"])
@pytest.mark.parametrize("scores", [2**26, 1], ids=["whole", "page-by-page"])
def test_it_reads_all_of_it_up_to_itself(
    monkeypatch: pytest.MonkeyPatch, count: int, behind: int, scores: int
) -> None:
    """``behind``: tokens on the device between the pages and the question."""
    monkeypatch.setattr(streamed_attention, "_SCORE_BYTES", scores)
    bench = Bench()
    row = bench.copied()
    first = PROMPT * bench.page + behind
    slots = bench.row_before[: first + count].long()
    place = 3  # other requests' tokens come before it in the pass
    q = torch.randn(place + count + 2, HEADS * GROUP, DIM)
    part = StreamedTokens(place, count, HostReader(bench.pages, row.host), slots[PROMPT * bench.page :])
    for each in (*bench.kv.k, *bench.kv.v):  # the prompt may be gone
        each.view(POOL, bench.page, HEADS, DIM)[bench.row_before[: PROMPT * 16 : 16].long() // 16] = torch.nan
    for layer in range(LAYERS):
        out = torch.full_like(q, 7)
        part.attend(q, out, (bench.kv.k[layer], bench.kv.v[layer]), layer, DIM**-0.5)
        k, v = (
            each[layer][slots].repeat_interleave(GROUP, 1).transpose(0, 1)
            for each in (bench.original.k, bench.original.v)
        )
        seen = torch.ones(count, first + count, dtype=torch.bool).tril(first)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[place : place + count].transpose(0, 1), k, v, attn_mask=seen
        ).transpose(0, 1)
        assert torch.allclose(out[place : place + count], wanted, atol=2e-6)
        assert (out[:place] == 7).all()
        assert (out[place + count :] == 7).all()
    assert part.layers == LAYERS


class Pages:
    """A prompt's K and V ``[kv_heads, tokens, head_dim]``, of every layer alike."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._kv = k, v

    def pieces(self, layer: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from zip(*(half.split(tokens, dim=1) for half in self._kv), strict=True)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.nbytes = max(self.nbytes, found.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("behind", [0, 11, 300], ids=lambda n: f"{n} behind")
def test_a_long_question_takes_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    heads, dim, before, count = HEADS * GROUP, 8, 111, 307
    bound = 4 * heads * count * 63  # the scores of 63 tokens
    monkeypatch.setattr(streamed_attention, "_SCORE_BYTES", bound)
    k, v = torch.randn(2, HEADS, before + behind + count, dim)
    slots = torch.randperm(behind + count)
    pool: Any = [torch.empty(len(slots), HEADS, dim) for _ in range(2)]
    for own, each in zip(pool, (k, v), strict=True):
        own[slots] = each[:, before:].transpose(0, 1)
    pages: Any = Pages(k[:, :before], v[:, :before])
    q = torch.randn(count, heads, dim)
    out = torch.full_like(q, torch.nan)
    with Largest() as largest:
        StreamedTokens(0, count, pages, slots).attend(q, out, tuple(pool), 0, dim**-0.5)
    seen = torch.ones(count, k.shape[1], dtype=torch.bool).tril(before + behind)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), *(each.repeat_interleave(GROUP, 0) for each in (k, v)), attn_mask=seen
    ).transpose(0, 1)
    assert torch.allclose(out, wanted, atol=2e-6)
    assert largest.nbytes <= bound
