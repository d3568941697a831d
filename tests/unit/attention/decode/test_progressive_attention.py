"""Progressive attention to a request whose prompt is on the host: what is read where, and what is chosen for
shared blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PagedBatch, PageSelection
from ragserve_kernels.progressive_decode import SharedPages
from sglang_ext.attention.decode.progressive_attention import ProgressiveAttention, ProgressiveToken, listed
from sglang_ext.attention.decode.tables import StepTables, TableShape
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.wire.attention_config import AttentionConfig
from tests.unit.kv_offload.offloaded_bench import DIM, HEADS, LAYERS, LIMIT, POOL, PROMPT, TAIL, Bench

CAPACITY = LIMIT + 2
SCALE = DIM**-0.5


def attention(bench: Bench, kv: KVLayers | None = None) -> ProgressiveAttention:
    """``kv``: the pool, if not the bench's."""
    statistics: Any = SimpleNamespace(tables=bench.statistics)
    by = ProgressiveAttention(AttentionConfig(), statistics, bench.pages.pool)
    by.shared_blocks = SharedPages(bench.rows.shared_blocks.places.of, kv or bench.kv)
    by.contexts = bench.rows.contexts
    return by


def ranked(width: int = CAPACITY) -> PageSelection:
    """All pages but the tail's, in an order for each layer and head, of which the last one has attended to
    most."""
    blocks = torch.rand(LAYERS, HEADS, PROMPT).argsort(-1)[..., :width].int()
    return PageSelection(blocks, torch.tensor([[1, 2], [1, width]], dtype=torch.int32))


def length(bench: Bench) -> int:
    return (PROMPT + TAIL) * bench.page - 5


def tables(bench: Bench) -> StepTables:
    """Two rows, of which the second one is the bench's request, and progressive."""
    shape = TableShape(
        layers=LAYERS,
        heads=2 * HEADS,
        kv_heads=HEADS,
        pages=bench.table.shape[1] // bench.page,
        capacity=CAPACITY,
        page_size=bench.page,
        head_dim=DIM,
        dtype=torch.float32,
        lags=True,
        pool_pages=POOL,
    )
    made = StepTables(2, shape, torch.device("cpu"), None)
    made.progressive[1] = 1
    return made


def set_lengths(made: StepTables, bench: Bench, statistics: torch.Tensor | None) -> None:
    lens = torch.tensor([1, length(bench)])
    made.set_lengths(bench.table, torch.tensor([0, 1]), lens, length(bench), statistics)


def attend(
    made: StepTables, bench: Bench, kv: KVLayers, q: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs [layers, heads, head_dim], pages used and pages read from the host [layers, kv_heads]
    of the bench's request."""
    by, rows, outs = attention(bench, kv), made.rows(2), []
    for layer in range(LAYERS):
        with forced_naive():
            _, part = by.attend(
                *(q[layer], (kv.k[layer], kv.v[layer]), rows.ranked, rows.ranked_scored, layer),
                threshold=threshold,
                scale=SCALE,
                places=rows.places[:, None].expand(-1, HEADS, -1),
            )
        assert part.from_host is not None
        outs.append((part.out[1], part.blocks_used[1], part.from_host[1]))
    out, used, reads = (torch.stack(each) for each in zip(*outs, strict=True))
    return out, used, reads


def spoilt(bench: Bench, row: OffloadedRow) -> tuple[KVLayers, torch.Tensor]:
    """Return the pool with NaN but for the shared blocks that hold pages and the tail, and spoil host pages
    of shared blocks.

    And how many pages of each layer and head are in shared blocks."""
    pool = KVLayers(
        *([torch.full_like(each, torch.nan) for each in half] for half in (bench.kv.k, bench.kv.v))
    )
    tail = bench.table[1, PROMPT * bench.page : (PROMPT + TAIL) * bench.page].long()
    of, lists, found = bench.rows.shared_blocks.places.of, LAYERS * HEADS, torch.zeros(LAYERS, HEADS)
    for before, after in zip((*bench.kv.k, *bench.kv.v), (*pool.k, *pool.v), strict=True):
        after[tail] = before[tail]
    for host in row.numbers:
        for layer in range(LAYERS):
            for head in range(HEADS):
                shared_block = int(of[host, layer, head])
                if shared_block < 0:
                    continue
                found[layer, head] += 1
                rows = slice(shared_block // lists * bench.page, (shared_block // lists + 1) * bench.page)
                for before, after in ((bench.kv.k, pool.k), (bench.kv.v, pool.v)):
                    to = shared_block // HEADS % LAYERS, rows, shared_block % HEADS
                    after[to[0]][to[1:]] = before[to[0]][to[1:]]
                if host < bench.pages.capacity:  # others have no memory of their own
                    bench.pages.pool[host, :, layer, head] = torch.nan
    return pool, found


@pytest.mark.parametrize("threshold", [0.4, 1.0])
@pytest.mark.parametrize(("page", "resident_blocks"), [(16, 2), (64, 1)], ids=["16", "64"])
def test_it_reads_shared_blocks_and_host_pages_and_nothing_else(
    page: int, resident_blocks: int, threshold: float
) -> None:
    bench = Bench(page=page, resident_blocks=resident_blocks, shared=True)
    resident = tables(bench)
    set_lengths(resident, bench, None)
    q = 2 * torch.randn(LAYERS, 2, 2 * HEADS, DIM)
    want, used, none = attend(resident, bench, bench.original, q, threshold)
    assert not none.any()
    row, _ = bench.moved(ranked())
    made = tables(bench)
    set_lengths(made, bench, bench.rows.statistics_of)
    pool, found = spoilt(bench, row)
    shared_blocks = resident_blocks * LIMIT * LAYERS * HEADS
    assert found.sum() == min(shared_blocks, CAPACITY * LAYERS * HEADS)
    assert resident_blocks > 1 or found[1, 1] > LIMIT, "the last head has more than its resident_blocks"
    got, pages, reads = attend(made, bench, pool, q, threshold)
    assert torch.equal(got, want)
    assert torch.equal(pages, used)
    if threshold == 1.0:
        assert torch.equal(reads, PROMPT - found)
    else:
        assert (reads < PROMPT - found).any()
        assert reads.any()


def test_before_anything_is_in_shared_blocks_all_of_the_prompt_is_read_from_the_host() -> None:
    bench = Bench(shared=True)
    bench.moved(PageSelection(torch.full_like(ranked().blocks, -1), ranked().counts))
    made = tables(bench)
    set_lengths(made, bench, bench.rows.statistics_of)
    q = torch.randn(LAYERS, 2, 2 * HEADS, DIM)
    _, used, reads = attend(made, bench, bench.kv, q, 1.0)
    assert (used == PROMPT + TAIL).all()
    assert (reads == PROMPT).all()


def test_a_token_that_was_retracted_attends_as_its_step_and_chooses_by_it() -> None:
    bench = Bench(shared=True)
    before = tables(bench)
    set_lengths(before, bench, None)
    q = 3 * torch.randn(LAYERS, 2, 2 * HEADS, DIM)
    want, used, _ = attend(before, bench, bench.original, q, 0.4)
    row, _ = bench.moved(ranked())
    pages = (bench.table[1, :: bench.page] // bench.page).int()[None]
    lens = torch.tensor([length(bench)], dtype=torch.int32)
    scored, places = pages.clone(), pages.clone()
    scored[0, :PROMPT], places[0, :PROMPT] = POOL + row.host, -1 - row.host
    token = ProgressiveToken(
        *(1, attention(bench), PagedBatch(pages, lens, bench.page), PagedBatch(scored, lens, bench.page)),
        *(places[:, None].expand(-1, HEADS, -1), 0.4),
    )
    for layer in range(LAYERS):
        out = torch.zeros(2, 2 * HEADS, DIM)
        with forced_naive():
            token.attend(q[layer], out, (bench.kv.k[layer], bench.kv.v[layer]), layer, SCALE)
        assert torch.equal(out[1], want[layer])
        assert not out[0].any()
    assert token.layers == LAYERS
    chosen = token.listed(5, CAPACITY)
    assert torch.equal(chosen.counts, used)
    assert (chosen.blocks[..., 5:] == -1).all()
    assert (chosen.blocks[..., :2] == torch.tensor([0, PROMPT + TAIL - 1])).all(), "forced pages come first"


def test_a_step_lists_the_pages_it_ranked_for_shared_blocks() -> None:
    bench = Bench()
    made = tables(bench)
    made.used[:, 1] = torch.tensor([[1, 2], [3, 9]])
    made.wanted[:, 1] = torch.arange(CAPACITY, dtype=torch.int32)
    chosen = made.listed(1, LIMIT)
    assert chosen.counts.tolist() == [[1, 2], [3, 9]]
    assert (chosen.blocks == torch.tensor([*range(LIMIT), *[-1] * (CAPACITY - LIMIT)])).all()
    made.wanted.zero_()
    made.used.zero_()
    assert chosen.blocks.any(), "a copy: the next step writes there"
    assert chosen.counts.any()
    chosen = listed(chosen.blocks, chosen.counts, chosen.counts[..., None])
    assert (chosen.blocks >= 0).sum(-1).tolist() == [[1, 2], [3, LIMIT]]
