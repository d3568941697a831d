"""Sparse prefill of a batch, layer by layer: dense, blocks and lines in one pass, and what was computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from ragserve_kernels.prefill_lists import LinePlan, Lines, choose_blocks, choose_lines
from ragserve_kernels.sparse_prefill import PrefillBatch, all_blocks, lists_of, sparse_prefill
from sglang_ext.attention.prefill.planner import ExtendRow, PrefillState
from sglang_ext.attention.prefill.sparse_prefill import BLOCK_K, BLOCK_Q, SparsePrefill
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.prefill_options import PrefillOptions

PAGE, HEADS, KV_HEADS, DIM, LAYERS = 16, 4, 2, 64, 3
ROWS = ((300, 140), (1100, 1000), (0, 700))  # tokens that were there, and new ones


@pytest.mark.parametrize("lines_by", ["segments", "prompt_end"])
def test_each_request_of_a_batch_attends_to_its_own_choice_in_every_layer(
    lines_by: Literal["segments", "prompt_end"],
) -> None:
    torch.manual_seed(7)
    table = torch.stack([torch.randperm(2112 // PAGE) for _ in ROWS]) * PAGE
    table += torch.arange(len(ROWS))[:, None] * 2112
    slots = (table[:, :, None] + torch.arange(PAGE)).flatten(1).int()  # the request table
    blocks = PrefillOptions(mode="block_sparse", alpha=0.8, streaming=True, dense_last=0)
    options = blocks, PrefillOptions(mode="vertical_slash", share=0.3, observe=16, dense_last=200)
    states = None, PrefillState(options[0]), PrefillState(options[1])
    ends = torch.rand(LAYERS, 2, HEADS, 11) < 0.2
    states[2].given = torch.stack([Lines(*layer).packed() for layer in ends])
    rows = [
        ExtendRow(SimpleNamespace(origin_input_ids=[1] * sum(row)), i, *row, states[i])
        for i, row in enumerate(ROWS)
    ]
    pattern = torch.tensor([[False, True], [True, False], [False, False]])
    config = AttentionConfig(sink_tokens=64, local_tokens=64, lines_by=lines_by)
    pass_ = SparsePrefill(rows, slots, PAGE, config, pattern)
    by_end: dict[str, Any] = {"segment": 2**20, "newest": True} if lines_by == "prompt_end" else {}
    pages = (slots[:, ::PAGE] // PAGE).int()
    prefix, new = zip(*ROWS, strict=True)
    whole = PrefillBatch.of(pages, PAGE, prefix, new, block_q=BLOCK_Q, block_k=BLOCK_K)
    spans, computed, taken, last = whole.spans(), [0, 0], torch.zeros(2), []
    starts = [sum(new[:i]) for i in range(len(new))]
    for layer in range(LAYERS):
        q = torch.randn(sum(new) + 2, HEADS, DIM) * 3  # two rows of padding
        k, v = torch.randn(2, len(ROWS) * 2112, KV_HEADS, DIM)
        got = pass_.attend(q, k, v, DIM**-0.5)
        width = -(-max(map(sum, ROWS)) // BLOCK_K)
        mask = torch.zeros(whole.query_blocks, HEADS, width, dtype=torch.bool)
        mask[: spans[0].stop] = torch.arange(width) < all_blocks(whole, 1).counts[: spans[0].stop, :, None]
        for i in (1, 2):
            alone = PrefillBatch.of(
                pages[i : i + 1], PAGE, [prefix[i]], [new[i]], block_q=BLOCK_Q, block_k=BLOCK_K
            )
            own = q[starts[i] : starts[i] + new[i]]
            if i == 1:
                chosen = choose_blocks(own, k, alone, alpha=0.8, sink=1, local=1, streaming=pattern[layer])
            else:
                plan = LinePlan.of(alone, HEADS, observe=16, **by_end)
                choice = choose_lines(own, k, plan, alpha=0.955, share=0.3, given=(Lines(*ends[layer]),))
                chosen, taken = choice.mask, taken + choice.counts[0]
                assert choice.last[0] is not None
                last.append(choice.last[0].packed())
                full = torch.arange(chosen.shape[2]) < all_blocks(alone, 1).counts[:, :, None]
                chosen = torch.where(torch.arange(6)[:, None, None] < 3, chosen, full)  # 500 of 700 tokens
            mask[spans[i].start : spans[i].stop, :, : chosen.shape[2]] = chosen
            computed[i - 1] += int(chosen.sum())
        want = sparse_prefill(q[:-2], k, v, whole, lists_of(mask), scale=DIM**-0.5)
        assert torch.equal(got[:-2], want)
        assert not got[-2:].any(), "padding"
    report = pass_.computed()
    assert report.counts[:, 0].tolist() == computed
    assert report.counts[0, 1:].tolist() == [0, 0]
    assert torch.equal(report.counts[1, 1:], taken.double())
    assert report.lines[0] is None
    assert torch.equal(report.lines[1], torch.stack(last))
    assert all(count < possible for count, possible in zip(computed, report.possible, strict=True))
