# mypy: disable-error-code="no-untyped-def"
"""What the searches for the last block or line that is taken have in common. Import with Triton only."""

from __future__ import annotations

import triton
import triton.language as tl

WHOLE: tl.constexpr = tl.constexpr(0)
"""All are taken."""
BY_SHARE: tl.constexpr = tl.constexpr(1)
"""As many as make a share of what can be computed."""
BY_WEIGHT: tl.constexpr = tl.constexpr(2)
"""As many as hold a part of the weight."""


@triton.jit
def ordered(b_score):
    """Return scores as uint32 keys of the same order, above 0; NaN counts as the lowest, -0 as 0."""
    b_score = tl.where(b_score != b_score, float("-inf"), b_score)
    b_score = tl.where(b_score == 0, 0.0, b_score)
    b_bits = b_score.to(tl.int32, bitcast=True)
    return (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
