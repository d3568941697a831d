# mypy: disable-error-code="no-untyped-def"
"""The kernel of ``quantize_kv``: a program quantises a few (token, head) rows and reads each once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.kv import rows_of
from ragserve_kernels.quantize_kv.types import QuantizedKV


@triton.jit(do_not_specialize=["n_rows"])
def _quantize(
    x,  # HeadRows of [tokens, kv_heads, D]
    p_slots,  # [tokens]
    codes,  # HeadRows of [slots, kv_heads, D], or D / 2 bytes of 4 bits
    p_pairs,  # float16 [slots, kv_heads, 2]: scale, zero point
    n_rows,
    kv_heads,
    D: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < n_rows
    i_token, i_head = i_row // kv_heads, i_row % kv_heads
    # [ROWS]
    i_slot = tl.load(p_slots + i_token, mask=m_row, other=-1).to(tl.int64)
    m_row = m_row & (i_slot >= 0)
    HALF: tl.constexpr = D // 2
    o_dim = tl.arange(0, HALF)
    p_row = x.p + (i_token * x.stride + i_head * x.stride_head)[:, None] + o_dim[None, :]
    # [ROWS, D / 2] each
    b_low = tl.load(p_row, mask=m_row[:, None], other=0.0).to(tl.float32)
    b_high = tl.load(p_row + HALF, mask=m_row[:, None], other=0.0).to(tl.float32)
    b_min = tl.minimum(tl.min(b_low, 1), tl.min(b_high, 1))
    b_max = tl.maximum(tl.max(b_low, 1), tl.max(b_high, 1))
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    b_scale = tl.div_rn(b_max - b_min, 2.0 * MIDDLE - 1.0).to(tl.float16)
    b_zero = (b_min + MIDDLE * b_scale.to(tl.float32)).to(tl.float16)
    # codes against the scale and zero point as stored
    b_step = b_scale.to(tl.float32)
    m_some = b_step > 0.0
    b_divisor = tl.where(m_some, b_step, 1.0)[:, None]
    b_offset = b_zero.to(tl.float32)[:, None]
    b_code_low = tl.floor(tl.div_rn(b_low - b_offset, tl.broadcast_to(b_divisor, b_low.shape)) + 0.5)
    b_code_high = tl.floor(tl.div_rn(b_high - b_offset, tl.broadcast_to(b_divisor, b_high.shape)) + 0.5)
    b_code_low = tl.where(
        m_some[:, None], tl.minimum(tl.maximum(b_code_low, -1.0 * MIDDLE), MIDDLE - 1.0), 0.0
    ).to(tl.int32)
    b_code_high = tl.where(
        m_some[:, None], tl.minimum(tl.maximum(b_code_high, -1.0 * MIDDLE), MIDDLE - 1.0), 0.0
    ).to(tl.int32)
    p_codes_row = codes.p + (i_slot * codes.stride + i_head * codes.stride_head)[:, None] + o_dim[None, :]
    if BITS == 4:
        tl.store(p_codes_row, ((b_code_low + 8) | ((b_code_high + 8) << 4)).to(tl.uint8), mask=m_row[:, None])
    else:
        tl.store(p_codes_row, b_code_low.to(tl.int8), mask=m_row[:, None])
        tl.store(p_codes_row + HALF, b_code_high.to(tl.int8), mask=m_row[:, None])
    o_param = (i_slot * kv_heads + i_head) * 2
    tl.store(p_pairs + o_param, b_scale, mask=m_row)
    tl.store(p_pairs + o_param + 1, b_zero, mask=m_row)


def quantize_kv(x: torch.Tensor, slots: torch.Tensor, into: QuantizedKV) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.quantize_kv.quantize_kv`."""
    tokens, heads, head_dim = x.shape
    rows = tokens * heads
    if not rows:
        return
    block = 16 if x.is_cuda else 64
    _quantize[(triton.cdiv(rows, block),)](
        rows_of(x),
        slots,
        rows_of(into.codes),
        into.params,
        rows,
        heads,
        D=head_dim,
        BITS=into.bits,
        ROWS=block,
        num_warps=4,
    )
