# mypy: disable-error-code="no-untyped-def"
"""The matrix product of our kernels. Import with Triton only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import interpreting


@triton.jit
def dot(b_a, b_b, b_acc, PRECISION: tl.constexpr):
    """``b_acc + b_a @ b_b``, summed in float32; ``PRECISION`` as :func:`dot_precision` gives it."""
    if PRECISION == "upcast":
        b_out = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc, input_precision="ieee")
    else:
        b_out = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)
    return b_out


def dot_precision(dtype: torch.dtype) -> str:
    """float32 is multiplied as float32, not rounded to tf32; the interpreter cannot multiply bfloat16, so
    there it is widened first.
    """
    if interpreting() and dtype == torch.bfloat16:
        return "upcast"
    return "ieee" if dtype == torch.float32 else "tf32"
