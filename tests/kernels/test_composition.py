"""Filling slots and the rows of the recompute pass: the kernels and the torch forwards against one token at a
time in float64.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.dispatch import forced_naive
from sglang_ext.context.compose.gather import Filling, Gather, needed_blocks
from sglang_ext.context.recompute.graphs import MANY_REQUESTS, MOST_REQUESTS, REQUESTS, StaticRows
from sglang_ext.context.recompute.job import RecomputeJob
from sglang_ext.context.recompute.row_attention import Rows
from sglang_ext.documents.pages.stored_pages import StoredPages
from sglang_ext.documents.pages.types import PAGE_BITS, KvShape
from sglang_ext.tensors.buffers import PADDING_SLOT
from sglang_ext.tensors.rope import Rotation
from tests.kernels.reference import assert_close

LAYERS, HEADS, DIM, BLOCK = 2, 2, 64, 4
ROTATION = Rotation(1.0 / (10000.0 ** (torch.arange(0, DIM, 2) / DIM)), DIM, neox=True)


class Pool:
    """The part of SGLang's pool that composing needs."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.layer_num = LAYERS
        self._counter: Any = None
        self.k_buffer, self.v_buffer = (
            [torch.randn(slots, HEADS, DIM, device=device) for _ in range(LAYERS)] for _ in "kv"
        )

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self._counter = counter

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """As SGLang's, which asks the counter first."""
        if self._counter is not None:
            self._counter.wait_until(layer)
        return self.k_buffer[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v_buffer[layer]


def moved(k: torch.Tensor, shift: int) -> torch.Tensor:
    angle = shift * ROTATION.frequencies
    a, b = k.double()[..., : DIM // 2], k.double()[..., DIM // 2 :]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def host_pages(count: int, device: torch.device, bits: int = 16) -> StoredPages:
    shape = KvShape(LAYERS, HEADS, DIM, torch.float32, BLOCK, bits)
    pages = StoredPages.of(torch.randn(count, *shape.block_shape), shape)
    return replace(pages, pool=pages.pool.pin_memory()) if device.type == "cuda" else pages


def fill_and_check(
    device: torch.device, draw: random.Random, *, per_layer: bool, triton: bool, bits: int
) -> None:
    pool = Pool(400, device)
    host = host_pages(40, device, bits)
    free, pages = draw.sample(range(400), 400), draw.sample(range(40), 40)
    fillings, wanted = [], []
    for _ in range(draw.randint(1, 3)):
        lengths = [draw.randint(1, 11) for _ in range(draw.randint(1, 4))]
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        total = sum(lengths)
        count = draw.randint(1, total)
        rows = [sorted(draw.sample(range(total), count)) for _ in range(LAYERS if per_layer else 1)]
        kept = np.array(rows if per_layer else rows[0], dtype=np.int64)
        ends = starts + lengths
        sources: list[Any] = []
        for blocks, length in zip(needed_blocks(kept, starts, ends, BLOCK), lengths, strict=True):
            if draw.random() < 0.5:
                sources.append(torch.tensor([free.pop() for _ in range(length)], device=device))
                continue
            own = np.full(-(-length // BLOCK), -1, dtype=np.int64)
            own[blocks] = [pages.pop() for _ in blocks]
            sources.append(own)
        slots = torch.tensor([free.pop() for _ in range(count)], device=device)
        closed = not per_layer and draw.random() < 0.4
        fillings.append(
            Filling(
                kept, slots, starts, starts if draw.random() < 0.8 else np.zeros_like(starts), sources, closed
            )
        )
    for filling in fillings:
        for layer in range(LAYERS):
            row = filling.kept if filling.kept.ndim == 1 else filling.kept[layer]
            for place, (position, slot) in enumerate(zip(row.tolist(), filling.slots.tolist(), strict=True)):
                i = int(np.searchsorted(filling.starts, position, side="right")) - 1
                source, token = filling.sources[i], position - int(filling.starts[i])
                if isinstance(source, torch.Tensor):
                    k, v = pool.k_buffer[layer][source[token]], pool.v_buffer[layer][source[token]]
                else:
                    page, within = torch.tensor([source[token // BLOCK]]), torch.tensor([token % BLOCK])
                    k, v = (each[0] for each in host.read(layer, page, within))
                wanted.append(
                    (
                        layer,
                        slot,
                        moved(k.cpu(), place - token if filling.closed else int(filling.shifts[i])),
                        v.clone(),
                    )
                )
    written = torch.cat([filling.slots for filling in fillings]).tolist()
    before = [[buffer.clone() for buffer in buffers] for buffers in (pool.k_buffer, pool.v_buffer)]
    with forced_naive(not triton):
        gather = Gather(pool, ROTATION, host, layers_at_once=draw.choice((1, LAYERS)))
        gather(fillings)
    for (
        layer,
        slot,
        k,
        v,
    ) in wanted:  # whoever asks the pool for a layer finds it filled, whatever is still on its way
        assert_close(pool.get_key_buffer(layer)[slot].cpu(), k, torch.float32)
        got = pool.get_value_buffer(layer)[slot].cpu()
        assert torch.equal(got, v.cpu()) if bits == 16 else torch.allclose(got, v.cpu(), rtol=1e-6, atol=1e-6)
    gather.finish()
    untouched = [slot for slot in range(400) if slot not in written]
    for buffers, old in zip((pool.k_buffer, pool.v_buffer), before, strict=True):
        assert all(torch.equal(now[untouched], was[untouched]) for now, was in zip(buffers, old, strict=True))


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("per_layer", [False, True], ids=["shared", "per-layer"])
@pytest.mark.parametrize("bits", PAGE_BITS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31 - 1))
def test_kept_tokens_of_device_and_host_documents_reach_their_slots(
    device: torch.device, per_layer: bool, triton: bool, bits: int, seed: int
) -> None:
    fill_and_check(device, random.Random(seed), per_layer=per_layer, triton=triton, bits=bits)


@pytest.mark.parametrize("pages", [0, 3])
def test_warming_up_writes_to_the_padding_slot_only(device: torch.device, pages: int) -> None:
    pool = Pool(8, device)
    host = host_pages(pages, device)
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    Gather(pool, ROTATION, host).warm()
    for was, now in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True):
        others = [slot for slot in range(8) if slot != PADDING_SLOT]
        assert torch.equal(was[others], now[others])
    if pages:
        assert not pool.v_buffer[0][PADDING_SLOT].any(), (
            "it may hold no NaN of memory that nobody has written"
        )


def job(
    device: torch.device, draw: random.Random, slots: list[int], *, layers: int, rows: int, holes: bool
) -> tuple[RecomputeJob, Any]:
    """A job whose rows are all kept, or with ``holes`` any positions; and kept positions and rows, to compute
    the truth from.
    """
    total = 2 * len(slots)
    kept = np.array([sorted(draw.sample(range(total), len(slots))) for _ in range(layers)], dtype=np.int64)
    everywhere = sorted(set.intersection(*(set(row.tolist()) for row in kept)))
    positions = np.array(sorted(draw.sample(range(total) if holes else everywhere, rows)), dtype=np.int64)
    own = torch.tensor(slots, device=device)
    planned = RecomputeJob.plan(
        positions.copy(), positions, kept if layers > 1 else kept[0], own, first_document=0
    )
    return planned, SimpleNamespace(kept=kept, positions=positions, slots=slots)


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("holes", [False, True], ids=["kept", "holes"])
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_rows_write_their_kv_and_see_what_is_kept_up_to_themselves(
    device: torch.device, seed: int, layers: int, holes: bool, triton: bool
) -> None:
    draw = random.Random(seed)
    pool = Pool(60, device)
    free = draw.sample(range(1, 60), 59)
    pairs = [
        job(device, draw, [free.pop() for _ in range(n)], layers=layers, rows=3, holes=holes)
        for n in (20, 25)
    ]
    rows = Rows.of([planned for planned, _ in pairs])
    total = sum(len(case.positions) for _, case in pairs)
    q, k, v = (torch.randn(total, heads, DIM, device=device) for heads in (2 * HEADS, HEADS, HEADS))
    for layer in range(LAYERS):
        keys, values = pool.k_buffer[layer], pool.v_buffer[layer]
        before = keys.clone(), values.clone()
        with forced_naive(not triton):
            got = rows.step(layer, q, k, v, keys, values, 0.2)
        at = 0
        for _, case in pairs:
            kept = case.kept[layer if layers > 1 else 0].tolist()
            here = {position: at + i for i, position in enumerate(case.positions.tolist())}
            k_of, v_of = {}, {}
            for position, slot in zip(kept, case.slots, strict=True):
                new = here.get(position)
                k_of[position] = (before[0][slot] if new is None else k[new]).double().cpu()
                v_of[position] = (before[1][slot] if new is None else v[new]).double().cpu()
                assert torch.equal(keys[slot].cpu(), k_of[position].float())
                assert torch.equal(values[slot].cpu(), v_of[position].float())
            for position, row in here.items():
                seen = [(k_of[p], v_of[p]) for p in kept if p <= position]
                if position not in k_of:
                    seen.append((k[row].double().cpu(), v[row].double().cpu()))
                k_all, v_all = (torch.stack(part).repeat_interleave(2, 1) for part in zip(*seen, strict=True))
                weights = torch.softmax((q[row].double().cpu() * k_all).sum(-1) * 0.2, 0)
                assert_close(got[row].cpu(), (weights[..., None] * v_all).sum(0), torch.float32)
            at += len(case.positions)
        others = [
            slot
            for slot in range(60)
            if slot != PADDING_SLOT and all(slot not in case.slots for _, case in pairs)
        ]
        assert torch.equal(keys[others], before[0][others]), (
            "only the jobs' slots and the padding slot are written"
        )


@pytest.mark.parametrize(
    ("most", "counts"), [(REQUESTS, (1, 4, 2)), (MANY_REQUESTS, (5, 1, 2)), (MOST_REQUESTS, (2, 5))]
)
def test_rows_at_fixed_addresses_do_as_the_rows_that_they_hold(
    device: torch.device, seed: int, most: int, counts: tuple[int, ...]
) -> None:
    """The same captured graph on CUDA for passes of different jobs; elsewhere no graph."""
    draw = random.Random(seed)
    size = 16
    static = StaticRows(size, 80, device)
    pool = Pool(60, device)
    q, k, v = (torch.randn(size, heads, DIM, device=device) for heads in (2 * HEADS, HEADS, HEADS))

    def step() -> torch.Tensor:
        return static.rows(size, most).step(0, q, k, v, pool.k_buffer[0], pool.v_buffer[0], 0.2)

    graph = None
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
    for count in counts:
        free = draw.sample(range(1, 60), 59)
        jobs = [
            job(device, draw, [free.pop() for _ in range(11)], layers=1, rows=3, holes=False)[0]
            for _ in range(count)
        ]
        assert static.fits(jobs)
        static.load(jobs, size)
        rows = 3 * count
        keys, values = pool.k_buffer[0].clone(), pool.v_buffer[0].clone()
        with forced_naive(True):
            wanted = Rows.of(jobs).step(0, q[:rows], k[:rows], v[:rows], keys, values, 0.2)
        if graph is None:
            got = step()
        else:
            graph.replay()
        assert_close(got[:rows].cpu(), wanted.double().cpu(), torch.float32)
        assert not got[rows:].any(), "padding must stay finite through the layers"
        written = [slot for slot in range(60) if slot != PADDING_SLOT]
        assert torch.equal(pool.k_buffer[0][written], keys[written])
        assert torch.equal(pool.v_buffer[0][written], values[written])


def test_what_a_larger_pass_left_is_not_looked_up_by_a_smaller_one(device: torch.device, seed: int) -> None:
    """A graph of few rows reads the last row of every possible job, also of absent ones."""
    draw = random.Random(seed)
    static = StaticRows(24, 80, device)
    for counts in ((6, 6, 6, 6), (3,), (2, 5)):
        jobs = [job(device, draw, list(range(1, 11)), layers=1, rows=rows, holes=False)[0] for rows in counts]
        static.load(jobs, 8 if sum(counts) <= 8 else 24)
        ends = [sum(counts[: n + 1]) - 1 for n in range(len(counts))]
        assert static.last.tolist() == ends + [0] * (len(static.last) - len(ends))


def test_only_few_small_jobs_that_are_the_same_in_every_layer_fit_fixed_addresses(
    device: torch.device, seed: int
) -> None:
    draw = random.Random(seed)
    static = StaticRows(8, 40, device)

    def jobs(count: int, *, slots: int = 10, layers: int = 1, rows: int = 2) -> list[RecomputeJob]:
        return [
            job(device, draw, list(range(1, slots + 1)), layers=layers, rows=rows, holes=False)[0]
            for _ in range(count)
        ]

    assert static.fits(jobs(4))
    most = MOST_REQUESTS
    assert StaticRows(most, 5 * most, device).fits(jobs(most, slots=5, rows=1))
    more = StaticRows(most + 1, 5 * most + 5, device)
    assert not more.fits(jobs(most + 1, slots=5, rows=1)), "more jobs than there are places"
    assert not static.fits(jobs(3, rows=3)), "more rows"
    assert not static.fits(jobs(3, slots=14)), "more slots"
    assert not static.fits(jobs(1, slots=30, layers=LAYERS, rows=1)), "rows that differ by layer"
    ids, kept = np.arange(6), np.arange(10)
    choosing = RecomputeJob.plan(
        ids, ids, kept, torch.arange(1, 11, device=device), first_document=2, deviation_share=0.5
    )
    assert not static.fits([choosing]), "rows that are chosen on the way"


def test_candidates_for_deviation_are_document_tokens_that_layer_1_keeps(device: torch.device) -> None:
    ids, slots = np.arange(6), torch.arange(4, device=device)
    kept = np.array([[0, 1, 2, 5], [0, 3, 4, 5]])
    planned = RecomputeJob.plan(ids, ids, kept, slots, first_document=2, deviation_share=0.5)
    assert planned.candidates is not None
    assert planned.candidates.tolist() == [3, 4, 5]
    assert (planned.choose, planned.recomputed) == (2, 2)
    planned.narrow(torch.tensor([3, 5], device=device), LAYERS)
    assert planned.positions.tolist() == [3, 5]
    assert planned.alone is not None
    assert planned.alone.tolist() == [[True, False], [False, False]]
    assert planned.targets.tolist() == [[PADDING_SLOT, PADDING_SLOT], [1, 3]], "layer 0 has their KV already"
    assert planned.seen.tolist() == [[3, 4], [2, 4]]
