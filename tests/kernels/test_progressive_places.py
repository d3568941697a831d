"""progressive_decode over pages that each KV head has elsewhere: in other pages of the pool, or on the
host.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch

from ragserve_kernels.context_gather import HostCodes, HostContexts
from ragserve_kernels.context_gather.naive import context_rows
from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.progressive_decode import PagePlaces, Rounds, SharedPages, progressive_decode
from tests.kernels.paged import Batch, make_batch
from tests.kernels.reference import assert_close
from tests.kernels.test_context_gather import coded
from tests.kernels.test_progressive_decode import ranked

GPU = torch.cuda.is_available()
LAYERS, LAYER = 3, 1


def moved(batch: Batch, share: float) -> tuple[Batch, PagePlaces]:
    """Move a ``share`` of each head's pages to the host and the others to new pages of the pool.

    What is left behind, resident blocks of nobody and host pages of nobody are NaN; entries past a request's
    pages are junk."""
    device, page = batch.q.device, batch.page_size
    heads, dim = batch.k.shape[1:]
    counts = [-(-n // page) for n in batch.seq_lens.tolist()]
    total = sum(counts) + 3
    pool = [torch.full((2 * total * page, heads, dim), math.nan, dtype=batch.q.dtype) for _ in range(2)]
    host = torch.full((total, 2, LAYERS, heads, page, dim), math.nan, dtype=batch.q.dtype)
    places = torch.full((len(counts), heads, max(1, *counts) + 1), 2**30, dtype=torch.int32)
    before = [batch.k.cpu(), batch.v.cpu()]
    for head in range(heads):
        resident_blocks, hosts = torch.randperm(2 * total).tolist(), torch.randperm(total).tolist()
        for row, count in enumerate(counts):
            for number in range(count):
                source = int(batch.page_table[row, number]) * page
                is_offloaded = float(torch.rand(())) < share
                target = hosts.pop() if is_offloaded else resident_blocks.pop()
                places[row, head, number] = -1 - target if is_offloaded else target
                for half in range(2):
                    values = before[half][source : source + page, head]
                    if is_offloaded:
                        host[target, half, LAYER, head] = values
                    else:
                        pool[half][target * page : (target + 1) * page, head] = values
    k, v = (each.to(device) for each in pool)
    pinned = host.pin_memory() if device.type == "cuda" else host
    return replace(batch, k=k, v=v), PagePlaces(places.to(device), pinned, LAYER)


def celled(there: Batch, places: PagePlaces, share: float) -> tuple[Batch, PagePlaces]:
    """Move a ``share`` of the pages on the host to shared blocks of the pool, in any layer and head.

    What is left behind is NaN, and so is the pool but for these shared blocks and what it had."""
    page, pages = there.page_size, len(there.k) // there.page_size
    heads, dim = there.k.shape[1:]
    buffers = [[torch.full_like(there.k, math.nan) for _ in range(LAYERS)] for _ in range(2)]
    buffers[0][LAYER], buffers[1][LAYER] = there.k.clone(), there.v.clone()
    of = torch.full((len(places.host), LAYERS, heads), -1, dtype=torch.int32)
    host = places.host.clone()
    spoilt = torch.isnan(there.k).view(pages, page, heads, dim).all(3).all(1)  # [pages, heads]
    free = [
        (number * LAYERS + layer) * heads + head
        for number in range(pages)
        for layer in range(LAYERS)
        for head in range(heads)
        if layer != LAYER or spoilt[number, head]
    ]
    shared = [free[i] for i in torch.randperm(len(free)).tolist()]
    for number in range(len(host)):
        for head in range(heads):
            if float(torch.rand(())) >= share:
                continue
            shared_block = of[number, LAYER, head] = shared.pop()
            rows = slice(
                int(shared_block) // (LAYERS * heads) * page,
                (int(shared_block) // (LAYERS * heads) + 1) * page,
            )
            for half in range(2):
                values = host[number, half, LAYER, head]
                buffers[half][int(shared_block) // heads % LAYERS][rows, int(shared_block) % heads] = (
                    values.to(there.k.device)
                )
            host[number, :, LAYER, head] = math.nan
    pinned = host.pin_memory() if places.host.is_pinned() else host
    pool = KVLayers(*buffers)
    found = PagePlaces(places.places, pinned, LAYER, SharedPages(of.to(there.k.device), pool))
    return replace(there, k=pool.k[LAYER], v=pool.v[LAYER]), found


def in_documents(
    batch: Batch, places: PagePlaces, share: float, half: int, codes: bool
) -> tuple[Batch, PagePlaces]:
    """Move a ``share`` of the pages on the host to rows of documents, in any order, and let ``batch``, which
    is the truth, have what these are, with their keys turned. Their numbers have no host page."""
    host, page, device = places.host, batch.page_size, batch.q.device
    pages, _, _, heads, _, dim = host.shape
    numbers = [number for number in range(pages) if float(torch.rand(())) < share]
    rows = torch.randperm(len(numbers) * page + 16).int()[: len(numbers) * page].view(-1, page)
    tokens = torch.full((2 * pages, page, 2), -1, dtype=torch.int32)
    angle = 9.0 * torch.rand(5, half)
    turns = torch.stack((angle.cos(), angle.sin()), 1)
    block = 16
    shape = len(numbers) * page // block + 1, 2, LAYERS, heads, block, dim
    if codes:
        documents: torch.Tensor | HostCodes = coded(torch.Size(shape))[0]
    else:
        values = torch.full(shape, math.nan, dtype=host.dtype)
        for number, own in zip(numbers, rows.long(), strict=True):
            values[own // block, :, LAYER, :, own % block] = host[number, :, LAYER].permute(2, 0, 1, 3)
        documents = values.pin_memory() if device.type == "cuda" else values
    pool = documents.pool if isinstance(documents, HostCodes) else documents
    now = places.places.clone()
    spoilt = host.clone()
    k, v = batch.k.clone(), batch.v.clone()
    shared = places.shared_blocks
    for number, own in zip(numbers, rows, strict=True):
        other = pages + number
        tokens[other] = torch.stack((own, torch.randint(5, (page,), dtype=torch.int32)), -1)
        now[places.places == -1 - number] = -1 - other
        spoilt[number] = math.nan
        for row, head, logical in (places.places == -1 - number).nonzero().tolist():
            if logical * page >= int(batch.seq_lens[row]):
                continue
            if shared is not None and int(shared.of[number, LAYER, head]) >= 0:
                continue
            at = int(batch.page_table[row, logical]) * page
            there = tokens[other].long()
            read = context_rows(documents, turns, there, LAYER, torch.tensor(head), host.dtype)
            k[at : at + page, head], v[at : at + page, head] = (each.to(device) for each in read)
    if shared is not None:
        none = torch.full_like(shared.of, -1)
        for number in numbers:
            none[number] = shared.of[number]
        of = shared.of.clone()
        of[numbers] = -1
        shared = shared._replace(of=torch.cat((of, none)))
    contexts = HostContexts(
        documents, torch.tensor([pool.data_ptr()], device=device), tokens.to(device), turns.to(device)
    )
    hosts = spoilt.pin_memory() if device.type == "cuda" else spoilt
    return replace(batch, k=k, v=v), PagePlaces(now, hosts, LAYER, shared, contexts)


def coming(there: Batch, places: PagePlaces, share: float) -> PagePlaces:
    """Let a ``share`` of the pages that no shared block has be on their way to shared blocks that nobody
    has."""
    shared = places.shared_blocks
    assert shared is not None
    numbers, layers, heads = shared.of.shape
    page, of = there.page_size, shared.of.cpu()
    free = [
        (slot // page * layers + layer) * heads + head
        for layer, (k, v) in enumerate(zip(shared.pool.k, shared.pool.v, strict=True))
        for head in range(heads)
        for slot in range(0, len(k), page)
        if bool(k[slot : slot + page, head].isnan().all() and v[slot : slot + page, head].isnan().all())
    ]
    order = torch.randperm(len(free)).tolist()
    for number in range(numbers):
        for head in range(heads):
            if int(of[number, LAYER, head]) < 0 and float(torch.rand(())) < share and order:
                of[number, LAYER, head] = -2 - free[order.pop()]
    shared.of.copy_(of)
    return places


def on_host(places: PagePlaces, row: int, head: int, pages: torch.Tensor) -> int:
    """Return how many of a row's pages are in no place of the pool."""
    found = places.places[row, head][pages].long()
    if places.shared_blocks is None:
        return int((found < 0).sum())
    of = places.shared_blocks.of[:, LAYER, head]
    return sum(place < 0 and int(of[-1 - place]) < 0 for place in found.tolist())


@pytest.mark.parametrize(
    ("share", "shared", "page_size", "head_dim", "dtype"),
    [
        (0.5, None, 16, 64, torch.float32),
        (0.5, None, 64, 128, torch.bfloat16),
        (1.0, None, 16, 64, torch.float32),
        (0.7, 0.5, 16, 64, torch.float32),
        (0.7, 0.5, 64, 128, torch.bfloat16),
        (1.0, 1.0, 128, 64, torch.float32),
    ],
    ids=str,
)
def test_it_attends_as_if_all_pages_were_in_the_pool(
    device: torch.device,
    share: float,
    shared: float | None,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    lens = [9001, 0, 130, 64] if GPU else [171, 0, 66]
    batch = make_batch(
        lens, device=device, page_size=page_size, head_dim=head_dim, heads=6, dtype=dtype, peak=6.0
    )
    ranking, options = ranked(batch), {"threshold": 0.6, "rounds": Rounds(2, 1.5), "bound": "round"}
    want = progressive_decode(*batch.inputs(), ranking, **options)
    assert want.from_host is None
    there, places = moved(batch, share)
    if shared is not None:
        there, places = celled(there, places, shared)
    for naive in (False, True):
        with forced_naive(naive):
            got = progressive_decode(*there.inputs(), ranking, **options, places=places)
        assert_close(got.out, want.out, dtype)
        assert torch.equal(got.blocks_used, want.blocks_used)
        assert got.from_host is not None
        for row in range(len(lens)):
            for head in range(2):
                read = ranking.blocks[row, head, : int(got.blocks_used[row, head])].long()
                assert int(got.from_host[row, head]) == on_host(places, row, head, read)
    if page_size == 16:
        assert (want.blocks_used < ranking.counts).any(), "the threshold stops some heads early"


@pytest.mark.parametrize(
    ("shared", "page_size", "head_dim", "dtype", "half", "codes", "bound"),
    [
        (None, 16, 64, torch.float32, 32, False, "round"),
        (0.5, 64, 128, torch.bfloat16, 64, False, "lowest"),
        (0.4, 128, 64, torch.float32, 20, False, "lowest"),
        (0.4, 128, 64, torch.float32, 32, False, "round"),
        (0.3, 16, 64, torch.float32, 32, True, "lowest"),
        (None, 64, 128, torch.bfloat16, 50, True, "round"),
    ],
    ids=str,
)
def test_pages_of_contexts_are_read_in_their_documents(
    device: torch.device,
    shared: float | None,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    half: int,
    codes: bool,
    bound: Literal["round", "lowest"],
) -> None:
    lens = [9001, 0, 130, 64] if GPU else [143, 0, 34]
    if not GPU:  # the interpreter cuts a float32 to bfloat16: too coarse for keys that are turned
        dtype = torch.float32
    batch = make_batch(
        lens, device=device, page_size=page_size, head_dim=head_dim, heads=6, dtype=dtype, peak=6.0
    )
    there, places = moved(batch, 0.7)
    if shared is not None:
        there, places = celled(there, places, shared)
    batch, places = in_documents(batch, places, 0.6, half, codes)
    ranking, options = ranked(batch), {"rounds": Rounds(2, 1.5), "bound": bound}
    for threshold in (0.6, 1.0):
        want = progressive_decode(*batch.inputs(), ranking, threshold=threshold, **options)
        for naive in (False, True):
            with forced_naive(naive):
                got = progressive_decode(
                    *there.inputs(), ranking, threshold=threshold, **options, places=places
                )
            assert_close(got.out, want.out, dtype)
            assert_close(got.weight, want.weight, dtype)
            assert torch.equal(got.blocks_used, want.blocks_used)
            assert got.from_host is not None
            for row in range(len(lens)):
                for head in range(2):
                    read = ranking.blocks[row, head, : int(got.blocks_used[row, head])].long()
                    assert int(got.from_host[row, head]) == on_host(places, row, head, read)


@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype", "half", "codes", "threshold"),
    [
        (16, 64, torch.float32, None, False, 0.6),
        (64, 128, torch.bfloat16, None, False, 1.0),
        (128, 64, torch.float32, 20, False, 0.6),
        (16, 64, torch.float32, 32, True, 0.6),
        (64, 128, torch.bfloat16, 64, False, 1.0),
    ],
    ids=str,
)
def test_pages_that_are_read_from_the_host_fill_shared_blocks(
    device: torch.device,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    half: int | None,
    codes: bool,
    threshold: float,
) -> None:
    """Of pages of requests and of contexts. Nothing else is written; what is not read is not entered."""
    lens = [9001, 0, 130, 64] if GPU else [143, 0, 34]
    if not GPU:
        dtype = torch.float32
    for _ in range(50):  # few pages: now and then none that is read has a shared block
        batch = make_batch(
            lens, device=device, page_size=page_size, head_dim=head_dim, heads=6, dtype=dtype, peak=6.0
        )
        there, places = celled(*moved(batch, 0.8), 0.3)
        if half is not None:
            batch, places = in_documents(batch, places, 0.6, half, codes)
        ranking, options = ranked(batch), {"rounds": Rounds(2, 1.5), "threshold": threshold, "bound": "round"}
        with forced_naive(True):
            want = progressive_decode(*there.inputs(), ranking, **options, places=places)
        places = coming(there, places, 0.6)
        shared = places.shared_blocks
        assert shared is not None
        read = torch.zeros_like(shared.of, dtype=torch.bool)
        for row, length in enumerate(lens):
            for head in range(2):
                for block in ranking.blocks[row, head, : int(want.blocks_used[row, head])].tolist():
                    place = int(places.places[row, head, block])
                    if place < 0 and (block + 1) * page_size <= length:
                        read[-1 - place, LAYER, head] = True
        filled = read & (shared.of < -1)
        if filled.any():
            break
    assert filled.any()
    before = (shared.of.clone(), [each.clone() for each in (*shared.pool.k, *shared.pool.v)])
    found = []
    for naive in (True, False):
        shared.of.copy_(before[0])
        for each, was in zip((*shared.pool.k, *shared.pool.v), before[1], strict=True):
            each.copy_(was)
        with forced_naive(naive):
            got = progressive_decode(*there.inputs(), ranking, **options, places=places)
        assert_close(got.out, want.out, dtype)
        assert torch.equal(got.blocks_used, want.blocks_used)
        assert torch.equal(got.from_host, want.from_host), "they have been read from there"
        found.append((shared.of.clone(), [each.clone() for each in (*shared.pool.k, *shared.pool.v)]))
    assert torch.equal(found[0][0], found[1][0])
    for wanted, made in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(wanted.isnan(), made.isnan())
        assert_close(made.nan_to_num(), wanted.nan_to_num(), dtype)
    assert torch.equal(shared.of, torch.where(filled, -2 - before[0], before[0]))
    again = progressive_decode(*there.inputs(), ranking, **options, places=places)
    assert_close(again.out, want.out, dtype)
    assert int(again.from_host.sum()) == int(want.from_host.sum()) - int(filled.sum())  # type: ignore[union-attr]


def test_threshold_one_reads_every_page_wherever_it_is(device: torch.device) -> None:
    batch = make_batch([130, 47], device=device, peak=2.0)
    ranking = ranked(batch)
    there, places = moved(batch, 0.7)
    got = progressive_decode(*there.inputs(), ranking, threshold=1.0, places=places)
    for row in range(2):
        for head in range(2):
            tokens = torch.arange(int(batch.seq_lens[row]))
            want = batch.attend(row, head, tokens)[0]
            assert_close(got.out[row, 2 * head : 2 * head + 2], want, torch.float32)
    assert torch.equal(got.blocks_used, ranking.counts)


def test_pages_after_the_stop_are_not_read(device: torch.device) -> None:
    batch = make_batch([1600], device=device, kv_heads=1, heads=2, peak=12.0)
    ranking, options = ranked(batch), {"threshold": 0.6, "rounds": Rounds(8, 1.0)}
    there, places = moved(batch, 0.5)
    first = progressive_decode(*there.inputs(), ranking, **options, places=places)
    used = int(first.blocks_used[0, 0])
    assert used < 100, "a peaked head stops early"
    for place in places.places[0, 0][ranking.blocks[0, 0, used:100].long()].tolist():
        if place < 0:
            places.host[-1 - place] = math.nan
        else:
            there.k[place * 16 : place * 16 + 16] = there.v[place * 16 : place * 16 + 16] = math.nan
    again = progressive_decode(*there.inputs(), ranking, **options, places=places)
    assert torch.equal(again.out, first.out)


def test_an_empty_batch_and_wrong_arguments(device: torch.device) -> None:
    batch = make_batch([40], device=device)
    ranking = ranked(batch)
    there, places = moved(batch, 0.5)

    def call(places: PagePlaces, block_size: int = 0, ranking: PageSelection = ranking) -> None:
        progressive_decode(there.q, there.kv, there.paged(block_size), ranking, places=places)

    with pytest.raises(ValueError, match="not pages"):
        call(places, 4)
    with pytest.raises(ValueError, match="layer is 3; host has 3 layers"):
        call(places._replace(layer=3))
    with pytest.raises(TypeError, match="places has dtype"):
        call(places._replace(places=places.places.long()))
    with pytest.raises(ValueError, match="host"):
        call(places._replace(host=places.host[:, :, :, :, :8]))
    in_shared, with_shared = celled(there, places, 0.5)
    shared = with_shared.shared_blocks
    assert shared is not None
    with pytest.raises(ValueError, match=r"shared_blocks.of has shape"):
        progressive_decode(
            *in_shared.inputs(),
            ranking,
            places=with_shared._replace(shared_blocks=shared._replace(of=shared.of[1:])),
        )
    one = KVLayers(shared.pool.k[:1], shared.pool.v[:1])
    with pytest.raises(ValueError, match=r"shared_blocks.pool has layers"):
        progressive_decode(
            *in_shared.inputs(), ranking, places=with_shared._replace(shared_blocks=shared._replace(pool=one))
        )
    few = make_batch([40], device=device, bits=8)
    with pytest.raises(ValueError, match="8 bits"):
        progressive_decode(*few.inputs(), ranking, places=places)
    none = replace((paged := there.paged()), page_table=paged.page_table[:0], seq_lens=paged.seq_lens[:0])
    nothing = PageSelection(ranking.blocks[:0], ranking.counts[:0])
    nowhere = places._replace(places=places.places[:0])
    got = progressive_decode(there.q[:0], there.kv, none, nothing, places=nowhere)
    assert got.from_host is not None
    assert got.from_host.shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_captured_graph_reads_where_the_pages_are_now() -> None:
    device = torch.device("cuda")
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64, "dtype": torch.bfloat16}
    batch = make_batch([9000, 3000], device=device, peak=4.0, **shape)
    ranking = ranked(batch)
    options = {"threshold": 0.9, "rounds": Rounds(8)}
    there, places = celled(*moved(batch, 0.5), 0.5)
    shared = places.shared_blocks
    assert shared is not None
    progressive_decode(*there.inputs(), ranking, **options, places=places)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = progressive_decode(*there.inputs(), ranking, **options, places=places)
    for share in (0.0, 1.0, 0.3):
        other, now = celled(*moved(batch, share), 0.5)
        assert now.shared_blocks is not None
        theirs = now.shared_blocks.pool
        for mine, its in zip((*shared.pool.k, *shared.pool.v), (*theirs.k, *theirs.v), strict=True):
            mine.copy_(its)
        shared.of.copy_(now.shared_blocks.of)
        places.host.copy_(now.host)
        places.places.copy_(now.places)
        got.out.fill_(torch.nan)
        graph.replay()
        want = progressive_decode(*other.inputs(), ranking, **options, places=now)
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.from_host, want.from_host)
