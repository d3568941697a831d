"""A prompt that is prefilled layer by layer: its K and V, the order of its segments, and its host pages."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.analysis.forward import attend
from sglang_ext.documents.fill import DocumentKv, fill_pages
from sglang_ext.kv_offload.host.layer_segments import LayerSegments
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.layer_writer import LayerWriter
from sglang_ext.state import current
from sglang_ext.wire.protocol import OffloadCounts
from tests.unit.context.small_model import KV_HEADS, LAYERS, VOCABULARY, runner_of
from tests.unit.kv_offload.offloaded_bench import DIM, HEADS, Bench
from tests.unit.kv_offload.offloaded_bench import LAYERS as BENCH_LAYERS


class Written:
    """Takes what segments write, in float32 [layers, tokens, KV_HEADS, head_dim]; notes who came when."""

    def __init__(self, tokens: int) -> None:
        self.k, self.v = ([[None] * tokens for _ in range(LAYERS)] for _ in "kv")
        self.order: list[tuple[int, int, int]] = []

    def __call__(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        assert k.shape == v.shape
        assert k.is_contiguous()
        assert v.is_contiguous()
        self.order.append((layer, first, len(k)))
        for kept, each in ((self.k, k), (self.v, v)):
            for at in range(len(each)):
                kept[layer][first + at] = each[at].clone()  # type: ignore[call-overload]


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (63, 16), (111, 48), (64, 64), (90, 512)])
def test_k_and_v_are_those_of_a_prefill_whatever_the_chunk(tokens: int, chunk: int) -> None:
    runner = runner_of(4)
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(tokens))
    written = Written(tokens)
    segments = LayerSegments(runner, ids, chunk, written)
    before = [each.clone() for each in runner.token_to_kv_pool.k_buffer]
    while segments.left:
        segments.advance(10)
    hidden, positions = runner.model.model.embed_tokens(ids).double(), torch.arange(tokens)
    future = torch.ones(tokens, tokens).triu(1).bool()
    for number, layer in enumerate(runner.model.model.layers):
        attn = layer.self_attn.attn
        q, k, v = (hidden @ projection.double() for projection in layer._projections)
        q = q.view(tokens, attn.tp_q_head_num, -1)
        k, v = (part.view(tokens, KV_HEADS, -1) for part in (k + positions[:, None] / 100, v))
        for got, want in ((written.k, k), (written.v, v)):
            torch.testing.assert_close(torch.stack(got[number]), want.float(), atol=1e-5, rtol=1e-5)
        group = attn.tp_q_head_num // KV_HEADS
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * attn.scaling
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
        hidden = hidden + out.flatten(1) @ layer._out.double()
    assert all(map(torch.equal, before, runner.token_to_kv_pool.k_buffer)), "nothing goes to the pool"


def test_a_chunk_is_planned_once_before_its_k_and_v_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[object, ...]] = []

    class Chunks:
        """Attends by plans, the first chunk alone."""

        def plan(self, number: int, rows: int, end: int, scale: float) -> object:
            events.append(("plan", number, rows, end))

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                assert (len(q), len(k), len(v)) == (rows, end, end)
                return attend(q, k, v, end - rows, scale)

            return run if not number else None

    def both(layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        events.append(("write", layer, first))
        written(layer, first, k, v)

    ids = torch.arange(40) % VOCABULARY
    kept = []
    for chunks in (None, Chunks()):
        monkeypatch.setattr(current, "chunk_attention", chunks)
        events.clear()
        written = Written(40)
        segments = LayerSegments(runner_of(4), ids, 16, both)
        segments.advance(10**6)
        kept.append([torch.stack(each) for each in (*written.k, *written.v)])
    plans = [("plan", number, rows, end) for number, (rows, end) in enumerate([(16, 16), (16, 32), (8, 40)])]
    writes = [("write", 0, first) for first in (0, 16, 32)]
    assert events[:6] == [each for pair in zip(plans, writes, strict=True) for each in pair]
    assert {each[0] for each in events[6:]} == {"write"}, "layers share the plans"
    torch.testing.assert_close(*kept)


@pytest.mark.parametrize(("inject", "units"), [(1, 1), (31, 1), (32, 2), (96, 6), (10**6, 12)])
def test_a_segment_is_bounded_and_a_layer_ends_before_the_next_one_begins(inject: int, units: int) -> None:
    written = Written(64)
    segments = LayerSegments(runner_of(4), torch.zeros(64, dtype=torch.int64), 16, written)
    assert segments.left == 4 * LAYERS
    counts = []
    while segments.left:
        had = len(written.order)
        segments.advance(inject)
        counts.append(len(written.order) - had)
    assert counts[:-1] == [units] * (len(counts) - 1)
    assert written.order == [(layer, 16 * i, 16) for layer in range(LAYERS) for i in range(4)]


@pytest.mark.parametrize(("pages", "chunk"), [(1, 1), (7, 3), (20, 20)])
def test_host_pages_and_statistics_are_those_of_the_same_kv_copied_as_a_whole(pages: int, chunk: int) -> None:
    bench = Bench(host=2 * 20)
    k, v = torch.randn(2, BENCH_LAYERS, pages * bench.page, HEADS, DIM)
    prefixes, writer = HostPrefixes(bench.rows), LayerWriter(bench.rows, chunk * bench.page)
    other = bench.pages.allocate(-1, 3)  # host pages that are not in a row
    prefix = prefixes.reserve(bench.req, len(k[0]) + 5, 1, 0 if pages > 2 else 1, OffloadCounts())
    if pages == 1:
        assert prefix is None, "it takes no more pages than its resident_blocks"
        return
    assert prefix is not None
    bench.pages.release(-1)
    assert other is not None
    bench.pages.pool[other] = torch.nan
    for layer in range(BENCH_LAYERS):
        for first in range(0, len(k[0]), chunk * bench.page):
            some = slice(first, first + chunk * bench.page)
            writer.write(prefix, layer, first, k[layer, some].contiguous(), v[layer, some].contiguous())
    writer.wait()
    want = torch.empty(pages, *bench.pages.shape.page_shape)
    blocks = list(range(pages))
    fill_pages(want, bench.pages.shape, blocks, blocks, DocumentKv.of(list(k), list(v)))
    assert torch.equal(bench.pages.pool[prefix.numbers], want)
    assert bench.pages.pool[other].isnan().all()
    where = bench.rows.first_host + prefix.host.long()
    got = bench.statistics.k_center[:, where].clone(), bench.statistics.k_max[:, bench.statistics.rows(where)]
    keys = k.view(BENCH_LAYERS, pages, bench.page, HEADS, DIM)
    runs = keys.unflatten(2, (bench.statistics.per_page, -1)).amax(3)
    assert torch.equal(got[1], runs.flatten(1, 2))
    torch.testing.assert_close(got[0], (keys.amax(2) + keys.amin(2)) / 2)
