"""quantize_kv: 8 and 4 bits, scale and zero point per token and head."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.quantize_kv import QuantizedKV, dequantize_kv, quantize_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def blank(slots: int, heads: int, head_dim: int, bits: int, device: torch.device) -> QuantizedKV:
    cache = QuantizedKV.empty(slots, heads, head_dim, bits=bits, device=device)
    cache.codes.fill_(42)
    cache.params.fill_(math.nan)
    return cache


def check(x: torch.Tensor, bits: int) -> None:
    """Every value within half a step (and the rounding of scale and zero); other slots untouched; codes as
    the plain forward's but for ties."""
    tokens, heads, head_dim = x.shape
    slots = torch.randperm(tokens + 5, device=x.device)[:tokens]
    caches = [blank(tokens + 5, heads, head_dim, bits, x.device) for _ in range(2)]
    quantize_kv(x, slots, caches[0])
    with forced_naive():
        quantize_kv(x, slots, caches[1])
    got = dequantize_kv(caches[0], slots)
    values = x.float()
    spread = (values.amax(-1) - values.amin(-1))[..., None]
    largest = values.abs().amax(-1, keepdim=True)
    step = spread / (2**bits - 1)
    # half a step, what the clamp costs when the stored scale is rounded down, and float16's floor for tiny
    # scales
    assert ((got - values).abs() <= 0.51 * step + spread * 2**-11 + largest * 2**-11 + 2**-14).all()
    assert torch.equal(caches[0].params[slots], caches[1].params[slots])
    assert ((got - dequantize_kv(caches[1], slots)).abs() <= 1.01 * step + 1e-6).all()
    rest = torch.ones(tokens + 5, dtype=torch.bool, device=x.device)
    rest[slots] = False
    assert (caches[0].codes[rest] == 42).all()
    assert caches[0].params[rest].isnan().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_error_is_half_a_step(device: torch.device, head_dim: int, dtype: torch.dtype, bits: int) -> None:
    check((3 * torch.randn(37, 3, head_dim)).to(dtype).to(device), bits)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 70),
    heads=st.integers(1, 8),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(DTYPES),
    scale=st.floats(1e-3, 100),
    shift=st.floats(-100, 100),
)
def test_any_shape_and_range(
    device: torch.device, tokens: int, heads: int, bits: int, dtype: torch.dtype, scale: float, shift: float
) -> None:
    check((scale * torch.randn(tokens, heads, 64) + shift).to(dtype).to(device), bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_constant_rows_and_skipped_slots(device: torch.device, bits: int) -> None:
    x = torch.full((3, 2, 64), 2.5, device=device)
    cache = blank(4, 2, 64, bits, device)
    quantize_kv(x, torch.tensor([2, -1, 0], device=device), cache)
    assert (dequantize_kv(cache)[[0, 2]] == 2.5).all()
    assert cache.params[[1, 3]].isnan().all()


def test_no_tokens(device: torch.device) -> None:
    cache = blank(2, 2, 64, 8, device)
    quantize_kv(torch.empty(0, 2, 64, device=device), torch.empty(0, dtype=torch.int64, device=device), cache)
    assert cache.params.isnan().all()


def test_strided_rows(device: torch.device) -> None:
    """K and V come as slices of one fused projection."""
    fused = torch.randn(9, 2, 3, 64, device=device)
    cache = blank(9, 2, 64, 8, device)
    quantize_kv(fused[:, :, 1], torch.arange(9, device=device), cache)
    assert (dequantize_kv(cache) - fused[:, :, 1]).abs().max() < 0.05


def test_wrong_arguments_are_named(device: torch.device) -> None:
    cache = blank(2, 2, 64, 8, device)
    with pytest.raises(ValueError, match="x has shape"):
        quantize_kv(
            torch.zeros(1, 3, 64, device=device), torch.zeros(1, dtype=torch.int64, device=device), cache
        )
    with pytest.raises(TypeError, match="slots has dtype"):
        quantize_kv(torch.zeros(1, 2, 64, device=device), torch.zeros(1, device=device), cache)
    with pytest.raises(ValueError, match="3 bits"):
        QuantizedKV(cache.codes, cache.params, 3)
