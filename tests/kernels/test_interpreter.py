"""The interpreter that kernel tests run on, where it is not Triton's own: `interpreter.py`."""

from __future__ import annotations

import pytest
import torch
import triton
from triton import language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@triton.jit
def _twice(value):  # type: ignore[no-untyped-def]
    return value + tl.zeros_like(value) + value


@triton.jit
def _row_sums(p_in, p_out, width, B: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.arange(0, B)
    row = tl.load(p_in + tl.program_id(0) * width + o, mask=o < width, other=0.0)
    tl.store(p_out + tl.program_id(0), tl.sum(_twice(row), 0))


def test_types_and_shapes_are_tritons() -> None:
    assert tl.block_type(tl.float32, [4, 8]) == tl.block_type(tl.float32, [4, tl.constexpr(8)])
    assert tl.block_type(tl.float32, [4, 8]) != tl.block_type(tl.int32, [4, 8])
    assert tl.block_type(tl.float32, [4, 8]) != tl.block_type(tl.float32, [8, 4])
    assert (str(tl.block_type(tl.float32, [4, 8])), tl.block_type(tl.int8, [4, 8]).numel) == (
        "<['4', '8'], fp32>",
        32,
    )
    with pytest.raises(TypeError, match="0d block_type"):
        tl.block_type(tl.float32, [])
    for _ in range(2):  # what failed once is not remembered as right
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [4, 3])


def test_the_language_is_as_before_after_a_launch() -> None:
    before = {module: dict(vars(module)) for module in (tl, tl.core, tl.math)}
    values, sums = torch.randn(3, 5), torch.empty(3)
    _row_sums[(3,)](values, sums, 5, B=8)
    assert torch.allclose(sums, 2 * values.sum(1))
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _row_sums[(3,)](values, sums, 5, B=6)
    for module, names in before.items():
        assert [name for name, value in vars(module).items() if value is not names.get(name)] == []
    _row_sums[(3,)](values, sums.fill_(0), 4, B=4)
    assert torch.allclose(sums, 2 * values.flatten()[:12].view(3, 4).sum(1))
