"""The two caches of examples/streaming_memory.py, in SGLang's pools, against attention by masks."""

from __future__ import annotations

import pytest
import torch

from examples.streaming_memory import TwoCaches, even

PAGE, SINK, LOCAL = 16, 20, 37
STREAMING = torch.tensor([[True, False], [True, True], [False, False]])
GROUP, DIM, SCALE = 3, 8, 0.3


def caches(size: int, streaming_size: int) -> TwoCaches:
    return TwoCaches(STREAMING, DIM, size, streaming_size, page=PAGE, sink=SINK, local=LOCAL)


def row_by_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, streaming: torch.Tensor) -> torch.Tensor:
    """Return the truth, by row and head: q [heads, tokens, dim], k and v [kv_heads, tokens, dim]."""
    out = torch.empty_like(q, dtype=torch.float64)
    sinks = 2 * PAGE  # the pages of the first 20 tokens
    for head in range(q.shape[0]):
        own = head // GROUP
        for row in range(q.shape[1]):
            tokens = list(range(row + 1))
            if streaming[own]:
                first = max(row + 1 - LOCAL, 0) // PAGE * PAGE
                tokens = [token for token in tokens if token < sinks or token >= first]
            scores = k[own, tokens].double() @ q[head, row].double() * SCALE
            out[head, row] = scores.softmax(0) @ v[own, tokens].double()
    return out


@pytest.mark.parametrize("chunks", [(211,), (64, 64, 83), (1, 99, 17, 16, 78), (150, *[1] * 61)])
def test_chunks_and_decoding_see_what_the_masks_say(chunks: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(len(chunks))
    total, layers = sum(chunks), len(STREAMING)
    q = torch.randn(layers, 2 * GROUP, total, DIM, generator=made)
    k, v = torch.randn(2, layers, 2, total, DIM, generator=made)
    two, start = caches(256, 256), 0
    found = torch.empty_like(q)
    for n in chunks:
        two.extend(n)
        rows = slice(start, start + n)
        for layer in range(layers):
            found[layer, :, rows] = two.attend(
                layer, q[layer, :, rows], k[layer, :, rows], v[layer, :, rows], SCALE
            )
        two.release()
        start += n
    for layer in range(layers):
        truth = row_by_row(q[layer], k[layer], v[layer], STREAMING[layer])
        torch.testing.assert_close(found[layer].double(), truth, rtol=1e-4, atol=1e-5)


def test_streaming_pages_go_back_and_nothing_leaks() -> None:
    two = caches(1024, 224)
    for _ in range(3):  # a request after the other, in the same pools
        for n in (64, 64, 64, 300 - 192, *[1] * 40):
            two.extend(n)
            two.release()
            full, streaming = two.pages()
            assert full == -(-two.tokens // PAGE)
            local = -(-two.tokens // PAGE) - max(two.tokens - LOCAL, 0) // PAGE
            assert streaming == min(full, 2 + local), "the pages of 20 first and of 37 latest tokens"
        assert two.held() == full / 2 + streaming / 2
        two.finish()
        assert two.pages() == (0, 0)


def test_a_full_cache_is_said() -> None:
    two = caches(1024, 64)
    two.extend(64)
    with pytest.raises(MemoryError, match="no slots for 16 tokens behind 64"):
        two.extend(16)


def test_even_patterns_take_the_lower_gates_of_each_layer() -> None:
    gates = torch.tensor([[0.9, 0.8, 0.1, 0.7], [0.0, 0.0, 0.0, 0.0]])
    assert even(gates).tolist() == [[False, False, True, True], [True, True, False, False]]
