# mypy: disable-error-code="no-untyped-def"
"""Device function of the kernels that read quantised KV. Import with Triton only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_and_zero(b_word):
    """Return scale and zero point, float32, of 4-byte words that each hold them as a float16 pair."""
    b_scale = (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    b_zero = (b_word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return b_scale.to(tl.float32), b_zero.to(tl.float32)
