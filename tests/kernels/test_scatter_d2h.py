"""scatter_d2h: tokens by heads into per-head host blocks, at once or by the background saver."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.scatter_d2h import Saver, scatter_d2h
from tests.kernels.reference import poisoned


def expected(src: torch.Tensor, host: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Token by token."""
    want = host.clone()
    for t in range(src.shape[0]):
        for h in range(src.shape[1]):
            if (block := int(index[h, t // host.shape[1]])) >= 0:
                want[block, t % host.shape[1]] = src[t, h].cpu()
    return want


def case(
    tokens: int, heads: int, block: int, *, device: str = "cpu", skip: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks = -(-tokens // block)
    src = torch.randn(tokens, heads, 64, device=device).bfloat16()
    host = poisoned(heads * blocks + 2, block, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    index = torch.randperm(heads * blocks + 2)[: heads * blocks].view(heads, blocks)
    if skip:
        index[torch.rand(index.shape) < 0.2] = -1
    return src, host, index


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(torch.isnan(got), torch.isnan(want)) and torch.equal(
        got.nan_to_num(), want.nan_to_num()
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 70),
    heads=st.integers(1, 4),
    block=st.sampled_from([1, 8, 16, 64]),
    skip=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_blocks_hold_their_tokens(tokens: int, heads: int, block: int, skip: bool, seed: int) -> None:
    torch.manual_seed(seed)
    src, host, index = case(tokens, heads, block, skip=skip)
    want = expected(src, host, index)
    scatter_d2h(src, host, index)
    assert same(host, want)


def test_bad_arguments() -> None:
    src, host, index = case(20, 2, 16, skip=False)
    with pytest.raises(ValueError, match="index has shape"):
        scatter_d2h(src, host, index[:1])
    with pytest.raises(ValueError, match="index names block 99; host has 6"):
        scatter_d2h(src, host, index.clamp(min=99))
    with pytest.raises(TypeError, match="host has dtype"):
        scatter_d2h(src, host.float(), index)
    with pytest.raises(ValueError, match="host has shape"):
        scatter_d2h(src, host[:, :, :32], index)
    with pytest.raises(ValueError, match="at least 1"):
        Saver(threads=0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 111, 2000])
def test_saver_hides_behind_later_work(tokens: int) -> None:
    with Saver(staging_bytes=4 << 20, buffers=2, threads=3) as saver:
        saves = []
        for _ in range(6):  # more than there are buffers
            src, host, index = case(tokens, 8, 16, device="cuda", skip=tokens == 111)
            want = expected(src, host, index)
            scatter_d2h(src, host, index, saver=saver)
            del src  # freed while it is being copied
            torch.full((tokens, 8, 64), 7.0, dtype=torch.bfloat16, device="cuda")
            saves.append((host, want))
        saver.wait()
        for host, want in saves:
            assert same(host, want)


@pytest.mark.gpu
def test_saver_refuses_what_does_not_fit() -> None:
    with Saver(staging_bytes=1024) as saver, pytest.raises(ValueError, match="a staging buffer has 1024"):
        scatter_d2h(*case(100, 8, 16, device="cuda"), saver=saver)
