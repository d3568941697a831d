"""Lists of blocks in every kernel's granularity say the same attention."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.lib.block_lists import SIDE, Pattern, attended, packed, random_pattern

GRANULARITIES = ((SIDE, SIDE), (64, 64), (32, 128), (32, 64), (128, 64))


def tokens_of(pattern: Pattern, heads: int, block_q: int, block_k: int) -> torch.Tensor:
    """bool [heads, queries, keys], by the lists of blocks of that size, token by token."""
    count, index = packed(pattern.divided(heads, block_q, block_k))
    keys = pattern.mask.shape[2] * SIDE
    found = torch.zeros(heads, pattern.mask.shape[1] * SIDE, keys, dtype=torch.bool)
    for head in range(heads):
        for query in range(found.shape[1]):
            own = index[head, query // block_q, : count[head, query // block_q]].tolist()
            assert own == sorted(set(own))
            assert min(own) >= 0
            for block in own:
                last = min((block + 1) * block_k, pattern.prefix + query + 1)
                found[head, query, block * block_k : last] = True
    return found


@pytest.mark.parametrize("prefix", [0, 384])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_lists_of_every_granularity_say_the_same_tokens(prefix: int, heads: int) -> None:
    pattern = random_pattern(prefix, 384, heads, 0.4, seed=prefix + heads, device="cpu")
    mask = pattern.for_heads(4).repeat_interleave(SIDE, 1).repeat_interleave(SIDE, 2)
    causal = torch.ones(384, prefix + 384, dtype=torch.bool).tril(prefix)
    for sizes in GRANULARITIES:
        assert torch.equal(tokens_of(pattern, 4, *sizes), mask & causal), sizes


def test_divided_blocks_leave_out_what_begins_after_their_queries() -> None:
    pattern = random_pattern(256, 256, 2, 1.0, seed=0, device="cpu")
    divided = pattern.divided(2, 32, 64)
    for row in range(divided.shape[1]):
        assert divided[0, row].sum() == -(-(256 + (row + 1) * 32) // 64)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4, 1.0])
def test_a_pattern_has_its_share_and_the_first_and_own_block(share: float) -> None:
    pattern = random_pattern(8192, 4096, 2, share, seed=1, device="cpu")
    assert abs(pattern.share - share) < 0.01
    own = torch.arange(4096 // SIDE) + 8192 // SIDE
    assert pattern.mask[:, :, 0].all()
    assert pattern.mask[:, torch.arange(len(own)), own].all()
    again = random_pattern(8192, 4096, 2, share, seed=1, device="cpu")
    assert torch.equal(again.mask, pattern.mask)
    if share < 1:
        assert not torch.equal(pattern.mask[0], pattern.mask[1])


def test_lengths_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        random_pattern(100, 256, 1, 0.5, seed=0, device="cpu")


def test_packed_lists_end_with_minus_one() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    count, index = packed(mask)
    assert count.tolist() == [2, 0]
    assert index.tolist() == [[0, 2], [-1, -1]]


def test_plain_attention_is_masked_attention() -> None:
    torch.manual_seed(0)
    prefix, new, heads, kv_heads = 256, 256, 4, 2
    q = torch.randn(new, heads, 16)
    k, v = (torch.randn(prefix + new, kv_heads, 16) for _ in range(2))
    pattern = random_pattern(prefix, new, kv_heads, 0.5, seed=2, device="cpu")
    mask = tokens_of(pattern, heads, SIDE, SIDE)
    for head in range(heads):
        keys, values = k[:, head // 2], v[:, head // 2]
        scores = (q[:, head] @ keys.T * 0.3).masked_fill(~mask[head], -math.inf)
        right = scores.softmax(-1) @ values
        found = torch.cat([attended(q, k, v, pattern, block, 0.3)[:, head] for block in range(2)])
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
