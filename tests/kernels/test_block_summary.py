"""block_summary: block statistics and SamKV's static attention analysis, against the whole attention matrix
in float64.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.block_summary import (
    BlockPlan,
    BlockSummary,
    block_summary,
    block_summary_naive,
    default_block_tokens,
    static_attention,
)
from ragserve_kernels.block_summary import pieces as block_summary_pieces
from ragserve_kernels.dispatch import forced_naive
from tests.kernels.reference import TOLERANCE, assert_close, attention64, relative_error

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ids = {"ids": lambda value: str(value).removeprefix("torch.")}


def inputs(
    device: torch.device,
    plan: BlockPlan,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(plan.tokens, heads[0], head_dim, device=device).to(dtype)
    k = torch.randn(plan.tokens, heads[1], head_dim, device=device).to(dtype)
    return q, k


def check(
    q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, *, lse: torch.Tensor | None = None
) -> BlockSummary:
    got = block_summary(q, k, plan, lse=lse)
    dtype, scale = q.dtype, 1 / math.sqrt(q.shape[2])
    want = block_summary_naive(q, k, plan, scale=scale, token=got.token)
    best = block_summary_naive(q, k, plan, scale=scale)
    for name in ("mean_k", "min_k", "max_k", "local_q", "received"):
        assert_close(getattr(got, name), getattr(want, name), dtype, name)
    fitted = best.token >= 0
    assert torch.equal(got.token >= 0, fitted), "which blocks have a token with enough later queries"
    for name in ("attention", "exponent"):
        value, truth = getattr(got, name), getattr(want, name)
        assert torch.isposinf(value[~fitted]).all()
        assert_close(value[fitted], truth[fitted], dtype, name)
    for first, last in pairwise(plan.doc_block.tolist()):
        exponent = got.exponent[first:last].double()
        finite = exponent[exponent.isfinite()]
        if len(finite):
            limit, spread = finite.mean() - 3 * finite.std(correction=0), finite.std(correction=0)
            clear = (exponent - limit).abs() > 1e-3 * spread + 1e-6
            assert torch.equal(got.outlier[first:last][clear], (exponent < limit)[clear])
    # two tokens may nearly tie; the chosen one is as good as the best up to rounding
    assert_close(got.attention[fitted], best.attention[fitted], dtype, "attention of the best token")
    block = torch.arange(plan.blocks, device=q.device)[fitted]
    assert (got.token[fitted] >= plan.block_start[block]).all()
    assert (got.token[fitted] < plan.block_start[block + 1]).all()
    return got


@pytest.mark.parametrize("dtype", DTYPES, **ids)
def test_ragged_documents(device: torch.device, dtype: torch.dtype) -> None:
    plan = BlockPlan.build([63, 1, 0, 40], block_tokens=16, device=device)
    check(*inputs(device, plan, dtype=dtype), plan)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (8, 8)], ids=str)
def test_query_groups(device: torch.device, heads: tuple[int, int]) -> None:
    plan = BlockPlan.build([37], block_tokens=8, device=device)
    check(*inputs(device, plan, heads=heads), plan)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_sizes(device: torch.device, head_dim: int) -> None:
    plan = BlockPlan.build([40], device=device)
    check(*inputs(device, plan, heads=(2, 1), head_dim=head_dim, dtype=torch.bfloat16), plan)


@pytest.mark.parametrize("block_tokens", [1, 8, 64, [5, 64]], ids=str)
def test_block_sizes(device: torch.device, block_tokens: int | list[int]) -> None:
    plan = BlockPlan.build([30, 20], block_tokens=block_tokens, device=device)
    check(*inputs(device, plan), plan)


def test_more_blocks_than_one_tile(device: torch.device) -> None:
    plan = BlockPlan.build([555, 9], block_tokens=2, query_stride=64, min_queries=2, device=device)
    check(*inputs(device, plan, heads=(1, 1)), plan)


@pytest.mark.parametrize("stride", [2, 3, 16])
def test_sampled_queries(device: torch.device, stride: int) -> None:
    plan = BlockPlan.build([50, 7], block_tokens=8, query_stride=stride, min_queries=2, device=device)
    check(*inputs(device, plan), plan)


def test_log_sum_exp_of_the_prefill_is_used(device: torch.device) -> None:
    plan = BlockPlan.build([45], block_tokens=16, device=device)
    q, k = inputs(device, plan)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) / 8
    lse = (
        scores.masked_fill(torch.ones(45, 45, device=device).triu(1).bool(), -math.inf).logsumexp(-1).float()
    )
    check(q, k, plan, lse=lse)
    shifted = block_summary(q, k, plan, lse=lse + 1)
    assert relative_error(shifted.received * math.e, block_summary(q, k, plan).received) < 1e-4


def test_received_attention_adds_up(device: torch.device) -> None:
    """Each query's weights sum to one: all that tokens receive from later queries and from themselves is one
    per query.
    """
    plan = BlockPlan.build([33], device=device)
    q, k = inputs(device, plan)
    causal = torch.ones(33, 33).tril().bool()
    own = attention64(q, k, k, causal)[1].diagonal(dim1=1, dim2=2).mean(0).sum()
    assert block_summary(q, k, plan).received.sum().item() == pytest.approx(33 - own.item(), rel=1e-4)


def rising(
    n: int, token: int, power: float, peak: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a head, scale 1. ``token`` has the weight peak * (x / n)^power at distance x; all
    other keys of a query share the rest equally.
    """
    q, k = torch.zeros(n, 1, 64, device=device), torch.zeros(n, 1, 64, device=device)
    queries = torch.arange(token + 1, n, dtype=torch.float64)
    weight = peak * ((queries - token) / n) ** power
    q[token + 1 :, 0, 0] = torch.log(weight / (1 - weight) * queries).float().to(device)
    k[token, 0, 0] = 1.0
    return q, k


def test_a_token_that_gains_attention_is_the_outlier(device: torch.device) -> None:
    n, loud = 128, 60
    plan = BlockPlan.build([n], block_tokens=8, min_queries=16, device=device)
    got = block_summary(*rising(n, loud, 2.0, 0.5, device), plan, scale=1.0)
    assert got.token[loud // 8] == loud
    assert got.exponent[loud // 8].item() == pytest.approx(-2.0, rel=1e-3)
    assert got.exponent.argmin() == loud // 8, "the most important block"
    assert got.outlier.nonzero().flatten().tolist() == [loud // 8]


@pytest.mark.parametrize(("power", "peak"), [(-0.7, 0.02), (0.5, 0.3)])
def test_exponent_of_a_power_law(device: torch.device, power: float, peak: float) -> None:
    """The most attended token of a block is the one that was made to follow the law."""
    plan = BlockPlan.build([100], block_tokens=128, min_queries=60, device=device)
    got = block_summary(*rising(100, 20, power, peak, device), plan, scale=1.0)
    assert got.token.tolist() == [20]
    assert got.exponent.item() == pytest.approx(-power, rel=1e-3)


def test_default_block_is_a_32nd_of_the_document() -> None:
    assert [default_block_tokens(n) for n in (1, 100, 256, 512, 513, 2000, 100_000)] == [
        8,
        8,
        8,
        16,
        16,
        64,
        64,
    ]


def test_forced_naive_and_no_documents(device: torch.device) -> None:
    plan = BlockPlan.build([40, 3], block_tokens=8, device=device)
    with forced_naive():
        check(*inputs(device, plan), plan)
    empty = BlockPlan.build([], device=device)
    got = block_summary(*inputs(device, empty), empty)
    assert got.mean_k.shape == (0, 2, 64)


@settings(
    max_examples=6 if not GPU else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    block_tokens=st.sampled_from([1, 8, 13, 64]),
    stride=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_shape(
    device: torch.device,
    lengths: list[int],
    block_tokens: int,
    stride: int,
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    plan = BlockPlan.build(lengths, block_tokens=block_tokens, query_stride=stride, device=device)
    check(*inputs(device, plan, heads=(kv_heads * group, kv_heads), dtype=dtype), plan)


def test_bad_arguments(device: torch.device) -> None:
    plan = BlockPlan.build([20], device=device)
    q, k = inputs(device, plan)
    with pytest.raises(ValueError, match="q has shape"):
        block_summary(q[1:], k, plan)
    with pytest.raises(TypeError, match="k has dtype"):
        block_summary(q, k.half(), plan)
    with pytest.raises(ValueError, match="not a multiple"):
        block_summary(q[:, :3], k, plan)
    with pytest.raises(ValueError, match="lse has shape"):
        block_summary(q, k, plan, lse=torch.zeros(4, 3, device=device))
    with pytest.raises(ValueError, match="one size from 1 to 128"):
        BlockPlan.build([20], block_tokens=[8, 8])
    with pytest.raises(ValueError, match="query_stride at least 1"):
        BlockPlan.build([20], query_stride=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("stride", [1, 8])
def test_large(device: torch.device, head_dim: int, dtype: torch.dtype, stride: int) -> None:
    plan = BlockPlan.build([2000, 111, 1, 63], query_stride=stride, device=device)
    check(*inputs(device, plan, heads=(8, 2), head_dim=head_dim, dtype=dtype), plan)


@pytest.mark.gpu
def test_documents_of_any_length_use_the_same_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    def summarise(lengths: list[int]) -> None:
        plan = BlockPlan.build(lengths, device=device)
        block_summary(*inputs(device, plan, dtype=torch.bfloat16), plan)

    summarise([500])
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **given: compiled.append(str(given["repr"]))
    )
    for lengths in ([1], [16], [523, 80], [4096], [20_001]):
        summarise(lengths)
    assert not compiled


@pytest.mark.gpu
def test_captured_graph(device: torch.device) -> None:
    plan = BlockPlan.build([500, 63], device=device)
    q, k = inputs(device, plan, dtype=torch.bfloat16)
    block_summary(q, k, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = block_summary(q, k, plan)
    q.normal_()
    k.normal_()
    graph.replay()
    want = block_summary(q, k, plan)
    for name in ("mean_k", "local_q", "received", "attention"):
        fitted = getattr(want, name).isfinite()
        assert (
            relative_error(getattr(got, name)[fitted], getattr(want, name)[fitted])
            < TOLERANCE[torch.bfloat16] / 10
        )


@pytest.mark.parametrize("lengths", [(63, 1, 0, 40), (555,), (111, 9, 2)], ids=str)
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("scores", [2**25, 700], ids=["at once", "in pieces"])
@pytest.mark.parametrize("dtype", DTYPES, **ids)
def test_static_attention_in_pieces(
    lengths: tuple[int, ...], stride: int, scores: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed in float32 whatever the dtype, as its reference is in float64."""
    monkeypatch.setattr(block_summary_pieces, "_CPU_SCORES", scores)
    monkeypatch.setattr(block_summary_pieces, "_TOKENS", 1)
    cpu = torch.device("cpu")
    plan = BlockPlan.build(lengths, block_tokens=8, query_stride=stride, min_queries=3, device=cpu)
    q, k = inputs(cpu, plan, heads=(6, 2), head_dim=24, dtype=dtype)
    q[::7] *= 8  # attention that is far from even
    steps, pairs = static_attention(q, k, plan, scale=0.3), []
    while True:
        try:
            pairs.append(next(steps))
        except StopIteration as end:
            got = end.value
            break
    want = block_summary_naive(q, k, plan, scale=0.3, token=got.token)
    best = block_summary_naive(q, k, plan, scale=0.3)
    fitted = best.token >= 0
    assert fitted.any()
    assert torch.equal(got.token >= 0, fitted)
    for name in ("attention", "exponent"):
        value = getattr(got, name)
        assert torch.isposinf(value[~fitted]).all()
        assert_close(value[fitted], getattr(want, name)[fitted], torch.float32, name)
    # two tokens may nearly tie
    assert_close(got.attention[fitted], best.attention[fitted], torch.float32, "attention of the best token")
    assert all(n * 3 <= max(scores, 3 * max(lengths)) for n in pairs), "one query of a group at least"
