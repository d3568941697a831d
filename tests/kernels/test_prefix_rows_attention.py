"""prefix_rows_attention: ragged rows over kept slots, against attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.prefix_rows_attention import prefix_rows_attention
from tests.kernels.reference import assert_close, attention64, poisoned

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ids = {"ids": lambda value: str(value).removeprefix("torch.")}


@dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    slot_start: torch.Tensor
    row_start: torch.Tensor
    row_len: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k, self.v, self.slots, self.slot_start, self.row_start, self.row_len)


def make(
    device: torch.device,
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    page: int = 1,
    ordered: bool = True,
    padding: int = 0,
) -> Case:
    """``requests``: (rows, kept slots) each; lengths from 0 to all kept. Slots of no request are NaN."""
    pages = [-(-kept // page) for _, kept in requests]
    order = torch.randperm(sum(pages) + 1)
    slots, used = [], 0
    for (_, kept), count in zip(requests, pages, strict=True):
        slots.append((order[used : used + count, None] * page + torch.arange(page)).flatten()[:kept])
        used += count
    pool = (len(order) * page, heads[1], head_dim)
    k, v = (poisoned(*pool, dtype=dtype, device=device) for _ in "kv")
    for own in slots:
        k[own.to(device)], v[own.to(device)] = (
            torch.randn(len(own), *pool[1:], device=device).to(dtype) for _ in "kv"
        )
    rows = [n for n, _ in requests]
    lengths = [torch.randint(0, kept + 1, (n,)) for n, kept in requests]
    if ordered:
        lengths = [own.sort().values for own in lengths]
    q = torch.randn(sum(rows) + padding, heads[0], head_dim, device=device).to(dtype)
    kept_before = torch.tensor([0, *(kept for _, kept in requests)]).cumsum(0)[:-1]
    return Case(
        q,
        k,
        v,
        torch.cat(slots).to(device=device, dtype=torch.int64 if page == 1 else torch.int32),
        kept_before.to(device=device, dtype=torch.int32),
        torch.tensor([0, *rows]).cumsum(0).to(device=device, dtype=torch.int32),
        torch.cat([*lengths, torch.full((padding,), 10**6)]).to(device=device, dtype=torch.int32),
    )


def truth(case: Case) -> torch.Tensor:
    want = torch.full(case.q.shape, float("nan"), dtype=torch.float64)
    starts, bounds, lengths = case.slot_start.tolist(), case.row_start.tolist(), case.row_len.cpu()
    for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
        own = lengths[first:last]
        slots = case.slots[start : start + int(own.max()) if last > first else start].long()
        mask = torch.arange(len(slots))[None, :] < own[:, None]
        want[first:last] = attention64(case.q[first:last], case.k[slots], case.v[slots], mask)[0]
    return want


def check(case: Case, dtype: torch.dtype, *, slack: int = 0) -> torch.Tensor:
    out = poisoned(*case.q.shape, dtype=dtype, device=case.q.device)
    rows = case.row_start.diff().max().item() + slack
    got = prefix_rows_attention(*case.args(), max_rows=int(rows), out=out)
    assert got is out
    want, last = truth(case), int(case.row_start[-1])
    assert_close(got[:last], want[:last], dtype)
    assert torch.isnan(got[last:]).all(), "padding rows are not written"
    return got


@pytest.mark.parametrize("dtype", DTYPES, **ids)
def test_ragged_batch(device: torch.device, dtype: torch.dtype) -> None:
    check(make(device, [(5, 63), (1, 1), (0, 4), (9, 40)], dtype=dtype), dtype)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1), (8, 8), (14, 2), (16, 1)], ids=str)
def test_query_groups(device: torch.device, heads: tuple[int, int]) -> None:
    check(make(device, [(6, 20)], heads=heads), torch.float32)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
def test_head_and_page_sizes(device: torch.device, head_dim: int, page: int) -> None:
    check(
        make(device, [(3, 70)], heads=(2, 1), head_dim=head_dim, page=page, dtype=torch.bfloat16),
        torch.bfloat16,
    )


def test_rows_in_any_order_and_padding_rows(device: torch.device) -> None:
    check(make(device, [(40, 90), (3, 5)], ordered=False, padding=3), torch.float32, slack=30)


def test_rows_without_slots_are_zero(device: torch.device) -> None:
    case = make(device, [(4, 10)])
    case.row_len[:2] = 0
    assert not check(case, torch.float32)[:2].any()


def test_all_rows_to_the_end_is_dense_attention(device: torch.device) -> None:
    case = make(device, [(7, 33)])
    case.row_len.fill_(33)
    got = prefix_rows_attention(*case.args(), max_rows=7)
    slots = case.slots.long()
    assert_close(got, attention64(case.q, case.k[slots], case.v[slots])[0], torch.float32)


@pytest.mark.parametrize("naive", [False, True], ids=["triton", "naive"])
def test_log_sum_exp_of_every_row(device: torch.device, naive: bool) -> None:
    case = make(device, [(5, 63), (3, 4)])
    case.row_len[0] = 0
    lse = poisoned(8, 4, dtype=torch.float32, device=device)
    with forced_naive(naive):
        prefix_rows_attention(*case.args(), max_rows=5, scale=0.3, lse=lse)
    for row in range(8):
        start = int(case.slot_start[0 if row < 5 else 1])
        own = case.slots[start : start + int(case.row_len[row])].long()
        keys = case.k[own].double().repeat_interleave(2, 1)
        want = (torch.einsum("hd,khd->hk", case.q[row].double(), keys) * 0.3).logsumexp(-1)
        torch.testing.assert_close(lse[row].double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_keys_split_over_programs(device: torch.device, splits: int) -> None:
    """Parts that hold all of a row's keys, some or none; the log-sum-exp is that of all; padding rows stay
    untouched.
    """
    from ragserve_kernels.prefix_rows_attention.triton import prefix_rows_attention_triton

    case = make(device, [(9, 150), (3, 4)], padding=2)
    case.row_len[0] = 0
    out, lse = (
        poisoned(*case.q.shape, dtype=torch.float32, device=device),
        poisoned(14, 4, dtype=torch.float32, device=device),
    )
    prefix_rows_attention_triton(*case.args(), out, lse, max_rows=9, scale=0.125, splits=splits)
    assert_close(out[:12], truth(case)[:12], torch.float32)
    assert torch.isnan(out[12:]).all(), "padding rows are not written"
    assert torch.isnan(lse[12:]).all()
    with forced_naive():
        want = torch.empty_like(lse)
        prefix_rows_attention(*case.args(), max_rows=9, scale=0.125, lse=want)
    torch.testing.assert_close(lse[:12], want[:12], rtol=2e-3, atol=2e-3)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = make(device, [(5, 40)])
    case.q.mul_(300)
    check(case, torch.float32)


def test_no_rows_and_no_requests(device: torch.device) -> None:
    case = make(device, [(0, 3)])
    assert prefix_rows_attention(*case.args(), max_rows=0).shape == (0, 4, 64)


def test_strided_queries(device: torch.device) -> None:
    """Q is usually a slice of the fused QKV projection's output."""
    case = make(device, [(5, 12)])
    fused = poisoned(5, 8, 64, dtype=torch.float32, device=device)
    fused[:, 2:6] = case.q
    case.q = fused[:, 2:6]
    check(case, torch.float32)


def test_forced_naive(device: torch.device) -> None:
    with forced_naive():
        check(make(device, [(5, 63), (0, 2), (1, 1)]), torch.float32)


@settings(
    max_examples=12 if not GPU else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    requests=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 70)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 7),
    dtype=st.sampled_from(DTYPES),
    ordered=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_shape(
    device: torch.device,
    requests: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
    ordered: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    case = make(device, requests, heads=(kv_heads * group, kv_heads), dtype=dtype, ordered=ordered)
    if case.q.shape[0]:
        check(case, dtype)


def test_bad_arguments(device: torch.device) -> None:
    case = make(device, [(3, 8)])
    names = ["q", "k", "v", "slots", "slot_start", "row_start", "row_len"]
    for change, error, message in [
        ({"q": case.q[:, :3]}, ValueError, "3 query heads are not a multiple of 2 KV heads"),
        ({"q": case.q.double()}, TypeError, "q has dtype"),
        ({"v": case.v[1:]}, ValueError, "v has shape"),
        ({"k": case.k.half()}, TypeError, "k has dtype"),
        ({"row_start": case.row_start[:1]}, ValueError, "row_start has shape"),
        ({"row_len": case.row_len.long()}, TypeError, "row_len has dtype"),
        ({"q": case.q[..., :32]}, ValueError, "Head size 32"),
    ]:
        with pytest.raises(error, match=message):
            prefix_rows_attention(**{**dict(zip(names, case.args(), strict=True)), **change}, max_rows=3)
    with pytest.raises(ValueError, match="max_rows"):
        prefix_rows_attention(*case.args(), max_rows=-1)
    with pytest.raises(ValueError, match="scale is 0"):
        prefix_rows_attention(*case.args(), max_rows=3, scale=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (8, 8)], ids=str)
def test_large(device: torch.device, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    check(
        make(device, [(333, 2000), (111, 63), (1, 1)], heads=heads, head_dim=head_dim, dtype=dtype, page=16),
        dtype,
    )


@pytest.mark.gpu
def test_addresses_beyond_32_bits(device: torch.device) -> None:
    case = make(device, [(20, 100)], heads=(8, 8), head_dim=128, dtype=torch.bfloat16)
    far = torch.empty(2**31 // 1024 + 256, 8, 128, dtype=torch.bfloat16, device=device)
    far[-len(case.k) :] = case.k
    case.k = far
    case.v = torch.cat(
        [torch.empty(len(far) - len(case.v), 8, 128, dtype=torch.bfloat16, device=device), case.v]
    )
    case.slots += len(far) - 101
    check(case, torch.bfloat16)


@pytest.mark.gpu
def test_captured_graph(device: torch.device) -> None:
    case = make(device, [(33, 100), (10, 50)], dtype=torch.bfloat16, heads=(32, 8), head_dim=128)
    out = poisoned(*case.q.shape, dtype=torch.bfloat16, device=device)
    prefix_rows_attention(*case.args(), max_rows=64, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefix_rows_attention(*case.args(), max_rows=64, out=out)
    case.q.normal_()
    case.row_len.clamp_(max=17)
    out.fill_(float("nan"))
    graph.replay()
    assert_close(out, truth(case), torch.bfloat16)
