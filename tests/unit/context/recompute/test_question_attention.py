"""How much a question attends to documents behind a dialogue whose own weights nobody asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.context.recompute.question_attention import largest_behind


@pytest.mark.parametrize("before", [1, 37, 99])
def test_a_dialogue_counts_in_the_sum_without_a_copy_of_its_keys(before: int) -> None:
    draw = torch.Generator().manual_seed(before)
    layers, heads, kv_heads, slots = 3, 4, 2, torch.randperm(200, generator=draw)[:100]
    keys = torch.randn(layers, 200, kv_heads, 64, generator=draw)
    pool = SimpleNamespace(get_key_buffer=keys.__getitem__, get_value_buffer=keys.__getitem__)
    q = torch.randn(2, heads, 64, generator=draw)
    wanted = torch.stack(
        [
            torch.stack(
                [(keys[layer][slots][:, h // 2] @ q[n, h] * 0.3).softmax(0) for h in range(heads)]
            ).amax(0)
            for n, layer in enumerate((1, 2))
        ]
    )
    torch.testing.assert_close(largest_behind(pool, range(1, 3), q, slots, 0, 0.3), wanted)
    found = largest_behind(pool, range(1, 3), q, slots, before, 0.3)
    torch.testing.assert_close(found, wanted[:, before:])
