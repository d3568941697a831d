"""A question reads a prompt on host pages as it would read it on the device."""

from __future__ import annotations

import pytest
import torch

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
