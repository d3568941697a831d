"""sparse_decode: paged decode attention of full, selected and streaming heads, plain and quantised.

Compiled, on a GPU, every combination runs; the interpreter is slow and gets a sample of them.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.paged import PagedBatch, PageSelection
from ragserve_kernels.sparse_decode import FULL, SELECTED, STREAMING, HeadKinds, sparse_decode
from tests.kernels.paged import Batch, make_batch, random_index
from tests.kernels.reference import assert_close, poisoned

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENS = [1, 63, 0, 111] if GPU else [1, 0, 111]


def decode(batch: Batch, block_size: int = 0, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = poisoned(*batch.q.shape, dtype=batch.q.dtype, device=batch.q.device)
    lse = poisoned(*batch.q.shape[:2], dtype=torch.float32, device=batch.q.device)
    assert sparse_decode(*batch.inputs(block_size), out=out, lse=lse, **options) is out
    return out, lse


def check(batch: Batch, **options: object) -> None:
    """Against the plain forward: output and log-sum-exp."""
    out, lse = decode(batch, **options)
    with forced_naive():
        want, want_lse = decode(batch, **options)
    assert_close(out, want, batch.q.dtype, "out")
    empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert_close(lse.masked_fill(empty, 0), want_lse.masked_fill(empty, 0), batch.q.dtype, "lse")
    assert not out[empty].any(), "heads without tokens give zero"


SAMPLE = [
    (1, torch.float32, 64),
    (16, torch.bfloat16, 64),
    (32, torch.float16, 128),
    (64, torch.float32, 256),
    (128, torch.bfloat16, 256),
]


EVERY = list(product([1, 16, 32, 64, 128], DTYPES, [64, 128, 256]))


@pytest.mark.parametrize(("page_size", "dtype", "head_dim"), EVERY if GPU else SAMPLE, ids=str)
def test_full_heads_are_dense_attention(
    device: torch.device, page_size: int, dtype: torch.dtype, head_dim: int
) -> None:
    batch = make_batch(LENS, device=device, page_size=page_size, dtype=dtype, head_dim=head_dim)
    out, _ = decode(batch)
    want = torch.zeros_like(out, dtype=torch.float64, device="cpu")
    for b, n in enumerate(LENS):
        for h in range(2):
            want[b, 2 * h : 2 * h + 2] = batch.attend(b, h, torch.arange(n))[0]
    assert_close(out, want, dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (20, 1), *([(32, 8), (71, 1)] if GPU else [])], ids=str
)
def test_query_groups(device: torch.device, heads: int, kv_heads: int) -> None:
    check(make_batch([63, 5], device=device, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("programs", [1, 2, 5, 64] if GPU else [1, 7])
def test_the_split_changes_nothing(device: torch.device, programs: int) -> None:
    batch = make_batch([2000, 1, 0, 130], device=device, kv_heads=1, heads=1, page_size=64)
    check(batch, programs=programs)


SIZES = [(16, 16), (64, 16), (16, 64), (1, 32), (128, 256), (32, 1)]


@pytest.mark.parametrize(
    ("page_size", "block_size", "bits"),
    [
        (*sizes, bits)
        for sizes, bits in (product(SIZES, [0, 8, 4]) if GPU else zip(SIZES, [0, 0, 8, 8, 4, 4], strict=True))
    ],
)
def test_only_selected_blocks_are_read(
    device: torch.device, page_size: int, block_size: int, bits: int
) -> None:
    batch = make_batch([300 if GPU else 141, 0, 1], device=device, page_size=page_size, bits=bits)
    selection = random_index(batch, block_size, 0.4)
    for b, n in enumerate(batch.seq_lens.tolist()):
        for h in range(2):
            chosen = selection.blocks[b, h, : selection.counts[b, h]].cpu().long()
            others = torch.ones(-(-n // block_size), dtype=torch.bool)
            others[chosen] = False
            batch.forget(b, h, others.nonzero().flatten(), block_size)
    check(batch, block_size=block_size, selection=selection)


@pytest.mark.parametrize("dtype", DTYPES if GPU else [torch.float16], ids=str)
def test_all_blocks_selected_equal_dense(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch([63, 111], device=device, dtype=dtype)
    dense, dense_lse = decode(batch)
    out, lse = decode(batch, selection=random_index(batch, 16, 1.0))
    assert_close(out, dense, dtype)
    assert_close(lse, dense_lse, dtype)


@pytest.mark.parametrize(
    ("sink_tokens", "local_tokens"),
    list(product([0, 1, 20], [1, 40, 500])) if GPU else [(0, 40), (20, 1), (1, 500)],
)
def test_three_kinds_of_heads_in_one_launch(
    device: torch.device, sink_tokens: int, local_tokens: int
) -> None:
    batch = make_batch([95, 17, 1, 0], device=device, heads=6, kv_heads=3)
    selection = random_index(batch, 16, 0.3)
    kinds = torch.tensor([STREAMING, FULL, SELECTED], dtype=torch.int32, device=device)
    for b, n in enumerate([95, 17, 1]):  # a streaming head reads its sink and local blocks only
        sink, local = -(-sink_tokens // 16), max(n - local_tokens, 0) // 16
        batch.forget(b, 0, torch.arange(sink, max(local, sink)), 16)
    check(batch, selection=selection, heads=HeadKinds(kinds, sink_tokens, local_tokens))


def test_kinds_by_request(device: torch.device) -> None:
    """Requests of all kinds in one launch read what each of them would alone."""
    batch = make_batch([77, 77, 40], device=device)
    selection = random_index(batch, 16, 0.4)
    kinds = torch.tensor(
        [[FULL, FULL], [SELECTED, STREAMING], [STREAMING, SELECTED]], dtype=torch.int32, device=device
    )
    out, lse = decode(batch, selection=selection, heads=HeadKinds(kinds, 16, 30))
    for b in range(3):
        alone, alone_lse = decode(batch, selection=selection, heads=HeadKinds(kinds[b].contiguous(), 16, 30))
        assert_close(out[b], alone[b], torch.float32)
        assert_close(lse[b], alone_lse[b], torch.float32)


@pytest.mark.parametrize(
    ("bits", "dtype"),
    list(product([8, 4], DTYPES)) if GPU else [(8, torch.bfloat16), (4, torch.float16)],
    ids=str,
)
def test_quantised(device: torch.device, bits: int, dtype: torch.dtype) -> None:
    check(make_batch(LENS, device=device, dtype=dtype, bits=bits, head_dim=128, page_size=64))


def test_no_counts_and_negative_entries_give_zero(device: torch.device) -> None:
    batch = make_batch([40, 40], device=device)
    index = torch.full((2, 2, 3), -1, dtype=torch.int32, device=device)
    counts = torch.tensor([[0, 3], [2, 0]], dtype=torch.int32, device=device)
    out, lse = decode(batch, selection=PageSelection(index, counts))
    assert not out.any()
    assert torch.isneginf(lse).all()


@settings(
    max_examples=60 if GPU else 5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4 if GPU else 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    page_size=st.sampled_from([1, 16, 32, 64, 128]),
    block_size=st.sampled_from([1, 8, 16, 64, 128]),
    bits=st.sampled_from([0, 4, 8]),
    dtype=st.sampled_from(DTYPES),
    programs=st.integers(1, 9),
    share=st.floats(0, 1),
)
def test_any_shape(
    device: torch.device,
    lens: list[int],
    kv_heads: int,
    group: int,
    page_size: int,
    block_size: int,
    bits: int,
    dtype: torch.dtype,
    programs: int,
    share: float,
) -> None:
    if (
        bits and not GPU
        # the interpreter cuts a float32 to bfloat16 instead of rounding it: too coarse for codes of few
        # tokens
    ):
        dtype = torch.float32
    batch = make_batch(
        lens,
        device=device,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        page_size=page_size,
        dtype=dtype,
        bits=bits,
    )
    selection = random_index(batch, block_size, share)
    kinds = torch.randint(0, 3, (kv_heads,), dtype=torch.int32, device=device)
    check(
        batch,
        block_size=block_size,
        selection=selection,
        heads=HeadKinds(kinds, 5, 33),
        programs=programs,
    )


def test_wrong_arguments_are_named(device: torch.device) -> None:
    batch = make_batch([20], device=device)
    q, (k, v), paged = batch.inputs()
    table, lens = batch.page_table, batch.seq_lens
    with pytest.raises(ValueError, match="Page size 3"):
        PagedBatch(table, lens, 3)
    with pytest.raises(ValueError, match="Block size 24"):
        PagedBatch(table, lens, 16, 24)
    with pytest.raises(TypeError, match="seq_lens has dtype"):
        PagedBatch(table, lens.long(), 16)
    with pytest.raises(ValueError, match="page_table has shape"):
        PagedBatch(table[:0], lens, 16)
    with pytest.raises(ValueError, match="not a multiple"):
        sparse_decode(q[:, :3], (k, v), paged)
    with pytest.raises(ValueError, match="q has shape"):
        sparse_decode(q[:0], (k, v), paged)
    with pytest.raises(TypeError, match="k has dtype"):
        sparse_decode(q, (k.double(), v), paged)
    wrong = PageSelection(
        *(torch.zeros(*shape, dtype=torch.int32, device=device) for shape in ((1, 2, 1), (1, 3)))
    )
    with pytest.raises(ValueError, match="counts has shape"):
        sparse_decode(q, (k, v), paged, selection=wrong)
    with pytest.raises(ValueError, match="sink_tokens and local_tokens"):
        sparse_decode(q, (k, v), paged, heads=HeadKinds(torch.zeros(2, dtype=torch.int32, device=device), -1))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_captured_graph_follows_its_inputs() -> None:
    device = torch.device("cuda")
    batch = make_batch(
        [5000, 300], device=device, heads=32, kv_heads=8, head_dim=128, page_size=64, dtype=torch.bfloat16
    )
    selection = random_index(batch, 64, 0.5)
    inputs = batch.inputs()
    out = torch.empty_like(batch.q)
    sparse_decode(*inputs, out=out, selection=selection)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_decode(*inputs, out=out, selection=selection)
    for lens, share in (([4000, 1], 0.2), ([0, 300], 1.0), ([4999, 299], 0.01)):
        batch.seq_lens.copy_(torch.tensor(lens))
        batch.q.normal_()
        fresh = random_index(batch, 64, share)
        selection.blocks[:, :, : fresh.blocks.shape[2]] = fresh.blocks
        selection.counts.copy_(fresh.counts)
        out.fill_(torch.nan)
        graph.replay()
        with forced_naive():
            want = sparse_decode(*inputs, selection=selection)
        assert_close(out, want, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("bits", [0, 8])
def test_addresses_beyond_two_billion_elements(bits: int) -> None:
    """A pool of 2.6 million slots x 8 heads x 128: 2.7e9 elements, the request at its end."""
    device = torch.device("cuda")
    small = make_batch(
        [3000],
        device=device,
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        bits=bits,
    )
    want, _ = decode(small)
    far = 40_000
    page_table = small.page_table + far
    caches = []
    for cache in (small.k, small.v):
        if bits:
            codes = torch.empty((far + 60) * 64, 8, 128, dtype=torch.int8, device=device)
            params = torch.empty((far + 60) * 64, 8, 2, dtype=torch.float16, device=device)
            codes[far * 64 : far * 64 + cache.codes.shape[0]] = cache.codes
            params[far * 64 : far * 64 + cache.codes.shape[0]] = cache.params
            caches.append(type(cache)(codes, params, bits))
        else:
            pool = torch.empty((far + 60) * 64, 8, 128, dtype=torch.bfloat16, device=device)
            pool[far * 64 : far * 64 + cache.shape[0]] = cache
            caches.append(pool)
    out = sparse_decode(small.q, tuple(caches), PagedBatch(page_table, small.seq_lens, 64))
    assert torch.equal(out, want)
