"""Two caches in SGLang's pools, and attention over them, against attention by masks over one cache."""

from __future__ import annotations

import random

import pytest
import torch

from examples.streaming_memory import even
from sglang_ext.attention.two_cache_attention import TwoCacheAttention
from sglang_ext.attention.two_caches import TwoCaches

PAGE, SINK, LOCAL = 16, 20, 37
SINKS, LOCALS = 2, 3  # pages of the first 20 tokens, pages before a row's own
STREAMING = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
LAYERS, KV_HEADS = STREAMING.shape
GROUP, DIM, SCALE = 2, 64, 0.1


def caches(size: int, streaming_size: int, requests: int = 1) -> TwoCaches:
    sizes = {"page": PAGE, "sink": SINK, "local": LOCAL}
    return TwoCaches(STREAMING, DIM, size, streaming_size, requests=requests, **sizes)


class Text:
    """Random q [layers, tokens, heads, head_dim], k and v of a request, and what its rows are to get."""

    def __init__(self, tokens: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.q = torch.randn(LAYERS, tokens, KV_HEADS * GROUP, DIM, generator=made)
        self.k, self.v = torch.randn(2, LAYERS, tokens, KV_HEADS, DIM, generator=made)
        row, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
        seen = (key // PAGE < SINKS) | (key // PAGE >= row // PAGE - LOCALS)
        masks = torch.where(STREAMING[..., None, None], seen, True) & (key <= row)
        masks = masks.repeat_interleave(GROUP, 1)  # [layers, heads, rows, keys]
        k, v = (half.double().repeat_interleave(GROUP, 2) for half in (self.k, self.v))
        scores = torch.einsum("lrhd,lkhd->lhrk", self.q.double(), k) * SCALE
        weights = scores.masked_fill(~masks, -torch.inf).softmax(-1)
        self.truth = torch.einsum("lhrk,lkhd->lrhd", weights, v)


def poison(two: TwoCaches) -> None:
    """Let it be seen where freed pages are read."""
    for allocator, pool in (
        (two.allocator.full_attn_allocator, two.pool.full_kv_pool),
        (two.allocator.swa_attn_allocator, two.pool.swa_kv_pool),
    ):
        freed = allocator.free_pages[:, None] * PAGE + torch.arange(PAGE)
        for half in pool.heads:
            half[:, freed.flatten()] = torch.nan


def run(two: TwoCaches, attention: TwoCacheAttention, texts: dict[int, Text], new: dict[int, int]) -> None:
    """Run an extend, or a step where each request has one new token, and compare."""
    spans = {row: slice(two.tokens[row], two.tokens[row] + n) for row, n in new.items()}
    for row in range(len(two.tokens)):
        two.release(row)
    poison(two)
    two.extend(new)
    step = all(n == 1 for n in new.values())
    if step:
        attention.begin_decode(list(new))
    else:
        attention.begin_extend(new)
    for layer in range(LAYERS):
        q, k, v, truth = (
            torch.cat([getattr(texts[row], name)[layer, span] for row, span in spans.items()])
            for name in ("q", "k", "v", "truth")
        )
        out = (attention.decode if step else attention.extend)(layer, q, k, v, SCALE)
        torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [(211,), (64, 64, 83), (2, 99, 17, 16, 77), (150, *[1] * 61)])
def test_chunks_and_decoding_see_what_the_masks_say(chunks: tuple[int, ...]) -> None:
    two = caches(256, 256)
    attention, text = TwoCacheAttention(two, KV_HEADS * GROUP), Text(sum(chunks), seed=len(chunks))
    for n in chunks:
        run(two, attention, {0: text}, {0: n})


def test_batches_with_aborts_and_retractions_see_the_same_and_leak_nothing() -> None:
    requests, chunk, made = 4, 48, random.Random(0)
    room = TwoCaches.streaming_room(requests, chunk, page=PAGE, sink=SINK, local=LOCAL)
    two = caches(requests * 256, room, requests)
    attention = TwoCacheAttention(two, KV_HEADS * GROUP)
    texts: dict[int, Text] = {}
    goals: dict[int, int] = {}  # tokens of the prompt; of a request that was retracted, all it had
    done = {"ended": 0, "aborted": 0, "retracted": 0}
    for turn in range(160):
        row = made.randrange(requests)
        if row not in texts:
            texts[row], goals[row] = Text(made.randrange(120, 250), seed=turn), made.randrange(60, 110)
        if two.tokens[row] < goals[row]:
            run(two, attention, texts, {row: min(chunk, goals[row] - two.tokens[row])})
        decoding = [row for row in texts if goals[row] <= two.tokens[row] < len(texts[row].q[0])]
        if decoding:
            run(two, attention, texts, dict.fromkeys(decoding, 1))
        for row in list(texts):
            luck = made.random()
            ended = two.tokens[row] == len(texts[row].q[0])
            if ended or luck < 0.01:
                done["ended" if ended else "aborted"] += 1
                two.finish(row)
                del texts[row]
            elif luck < 0.02 and two.tokens[row]:
                done["retracted"] += 1
                goals[row] = max(goals[row], two.tokens[row])
                two.finish(row)
        full, streaming = two.pages()
        assert full == sum(-(-tokens // PAGE) for tokens in two.tokens)
        assert streaming <= min(full, room // PAGE)
    assert min(done["aborted"], done["retracted"]) > 0, done
    for row in list(texts):
        two.finish(row)
    assert two.pages() == (0, 0)


def test_the_room_for_streaming_heads_is_what_they_need_at_most() -> None:
    room = TwoCaches.streaming_room(3, 48, page=PAGE, sink=SINK, local=LOCAL)
    for less in (0, PAGE):
        two = caches(1024, room - less, requests=3)
        for row in range(3):
            for n in (48, 48, 33):  # into a page
                two.extend({row: n})
                two.release(row)
        if less:
            with pytest.raises(MemoryError):
                two.extend({2: 48})
        else:
            two.extend({2: 48})
            assert two.pages()[1] == room // PAGE


def test_half_of_the_heads_streaming_hold_45_percent_fewer_pages_at_4k() -> None:
    streaming = torch.tensor([[True, False], [False, True]])
    two = TwoCaches(streaming, DIM, 4352, 4352, page=64, sink=64, local=256)
    for _ in range(2):
        two.extend({0: 2048})
        two.release()
    for _ in range(65):  # a page begins
        two.release()
        two.extend({0: 1})
        assert two.held() <= 0.55 * two.pages()[0]
    two.finish()
    assert two.pages() == (0, 0)


def test_a_full_cache_is_said_and_takes_nothing() -> None:
    two = caches(1024, 64, requests=2)
    two.extend({0: 48})
    with pytest.raises(MemoryError, match="no slots for 1 tokens behind 48, 16 tokens behind 0"):
        two.extend({0: 1, 1: 16})
    assert (two.tokens, two.pages()) == ([48, 0], (3, 3))
    with pytest.raises(ValueError, match="expected whole pages of 16"):
        caches(1024, 60)


def test_even_patterns_take_the_lower_gates_of_each_layer() -> None:
    gates = torch.tensor([[0.9, 0.8, 0.1, 0.7], [0.0, 0.0, 0.0, 0.0]])
    assert even(gates).tolist() == [[False, False, True, True], [True, True, False, False]]
