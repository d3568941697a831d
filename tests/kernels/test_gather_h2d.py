"""gather_h2d: scattered host blocks into device blocks, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.gather_h2d import gather_h2d, gather_h2d_naive
from tests.kernels.reference import poisoned

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def arena(blocks: int, tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.randn(blocks, tokens, head_dim, pin_memory=GPU).to(dtype).pin_memory()
        if GPU
        else torch.randn(blocks, tokens, head_dim).to(dtype)
    )


def check(
    device: torch.device,
    arenas: int,
    blocks: int,
    tokens: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    take: int,
    programs: int | None = None,
) -> None:
    host = [arena(blocks, tokens, head_dim, dtype) for _ in range(arenas)]
    index = torch.randint(
        -1, blocks, (take,), device=device
    )  # -1: skipped; the same block may be wanted twice
    out_index = torch.randperm(take + 2, device=device)[:take].int()
    got, want = (
        [poisoned(take + 2, tokens, head_dim, dtype=dtype, device=device) for _ in host] for _ in range(2)
    )
    gather_h2d(host, got, index, out_index, programs=programs)
    gather_h2d_naive(host, want, index, out_index)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(torch.isnan(g), torch.isnan(w)), "wrote another block, or left one out"
        assert torch.equal(g.nan_to_num(), w.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 63])
@pytest.mark.parametrize("arenas", [1, 2])
def test_blocks_arrive_unchanged(device: torch.device, arenas: int, tokens: int, dtype: torch.dtype) -> None:
    check(device, arenas, 7, tokens, 64, dtype, take=5)


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_number_of_programs(device: torch.device, programs: int) -> None:
    check(device, 2, 9, 16, 128, torch.float32, take=11, programs=programs)


def test_no_blocks(device: torch.device) -> None:
    check(device, 2, 3, 16, 64, torch.bfloat16, take=0)


def test_forced_naive(device: torch.device) -> None:
    with forced_naive():
        check(device, 2, 5, 16, 64, torch.bfloat16, take=6)


@settings(
    max_examples=12 if not GPU else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    blocks=st.integers(1, 20),
    tokens=st.integers(1, 80),
    head_dim=st.sampled_from([64, 128, 256]),
    take=st.integers(0, 10),
    arenas=st.integers(1, 2),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_shape(
    device: torch.device, blocks: int, tokens: int, head_dim: int, take: int, arenas: int, seed: int
) -> None:
    torch.manual_seed(seed)
    check(device, arenas, blocks, tokens, head_dim, torch.bfloat16, take=take)


def test_bad_arguments(device: torch.device) -> None:
    host, out = [arena(4, 16, 64, torch.float32)], [torch.zeros(4, 16, 64, device=device)]
    index = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="one of each, or two"):
        gather_h2d(host * 3, out * 3, index, index)
    with pytest.raises(ValueError, match=r"out\[0\] has shape"):
        gather_h2d(host, [out[0][:, :8]], index, index)
    with pytest.raises(TypeError, match=r"out\[0\] has dtype"):
        gather_h2d(host, [out[0].half()], index, index)
    with pytest.raises(TypeError, match="index has dtype"):
        gather_h2d(host, out, index.float(), index)
    with pytest.raises(ValueError, match="out_index has shape"):
        gather_h2d(host, out, index, index[:1])
    with pytest.raises(ValueError, match="multiple of 16"):
        gather_h2d([torch.zeros(4, 3, pin_memory=GPU)], [torch.zeros(4, 3, device=device)], index, index)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 128])
def test_large(device: torch.device, tokens: int) -> None:
    check(device, 2, 4000, tokens, 128, torch.bfloat16, take=3000)


@pytest.mark.gpu
def test_memory_that_is_not_pinned_is_refused(device: torch.device) -> None:
    index = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="not pinned"):
        gather_h2d([torch.zeros(4, 16, 64)], [torch.zeros(4, 16, 64, device=device)], index, index)


@pytest.mark.gpu
def test_captured_graph_reads_the_index_of_the_day(device: torch.device) -> None:
    host, out = (
        [arena(8, 16, 128, torch.bfloat16)],
        [poisoned(4, 16, 128, dtype=torch.bfloat16, device=device)],
    )
    index, target = torch.arange(4, device=device), torch.arange(4, device=device)
    gather_h2d(host, out, index, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_h2d(host, out, index, target)
    index.copy_(torch.tensor([7, -1, 5, 6]))
    out[0].fill_(float("nan"))
    graph.replay()
    assert torch.equal(out[0][[0, 2, 3]].cpu(), host[0][[7, 5, 6]])
    assert torch.isnan(out[0][1]).all()
