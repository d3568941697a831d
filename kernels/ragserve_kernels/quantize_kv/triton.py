# mypy: disable-error-code="no-untyped-def"
"""One program quantises a few (token, head) rows; a row is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.quantize_kv.types import QuantizedKV


@triton.jit
def _quantize(
    x,
    slots,
    codes,
    pairs,
    rows,
    heads,
    stride_x_token,
    stride_x_head,
    stride_token,
    stride_head,
    D: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = i_row < rows
    i_token, i_head = i_row // heads, i_row % heads
    slot = tl.load(slots + i_token, mask=ok, other=-1).to(tl.int64)
    ok = ok & (slot >= 0)
    half: tl.constexpr = D // 2
    cols = tl.arange(0, half)
    source = x + (i_token * stride_x_token + i_head * stride_x_head)[:, None] + cols[None, :]
    # [ROWS, D / 2] each
    b_low = tl.load(source, mask=ok[:, None], other=0.0).to(tl.float32)
    b_high = tl.load(source + half, mask=ok[:, None], other=0.0).to(tl.float32)
    smallest = tl.minimum(tl.min(b_low, 1), tl.min(b_high, 1))
    largest = tl.maximum(tl.max(b_low, 1), tl.max(b_high, 1))
    middle: tl.constexpr = 1 << (BITS - 1)
    scale = tl.div_rn(largest - smallest, 2.0 * middle - 1.0).to(tl.float16)
    zero = (smallest + middle * scale.to(tl.float32)).to(tl.float16)
    # codes against the stored scale and zero
    step = scale.to(tl.float32)
    usable = step > 0.0
    divisor = tl.where(usable, step, 1.0)[:, None]
    offset = zero.to(tl.float32)[:, None]
    c_low = tl.floor(tl.div_rn(b_low - offset, tl.broadcast_to(divisor, b_low.shape)) + 0.5)
    c_high = tl.floor(tl.div_rn(b_high - offset, tl.broadcast_to(divisor, b_high.shape)) + 0.5)
    c_low = tl.where(usable[:, None], tl.minimum(tl.maximum(c_low, -1.0 * middle), middle - 1.0), 0.0).to(
        tl.int32
    )
    c_high = tl.where(usable[:, None], tl.minimum(tl.maximum(c_high, -1.0 * middle), middle - 1.0), 0.0).to(
        tl.int32
    )
    target = codes + (slot * stride_token + i_head * stride_head)[:, None] + cols[None, :]
    if BITS == 4:
        tl.store(target, ((c_low + 8) | ((c_high + 8) << 4)).to(tl.uint8), mask=ok[:, None])
    else:
        tl.store(target, c_low.to(tl.int8), mask=ok[:, None])
        tl.store(target + half, c_high.to(tl.int8), mask=ok[:, None])
    o_param = (slot * heads + i_head) * 2
    tl.store(pairs + o_param, scale, mask=ok)
    tl.store(pairs + o_param + 1, zero, mask=ok)


def quantize_kv(x: torch.Tensor, slots: torch.Tensor, into: QuantizedKV) -> None:
    tokens, heads, head_dim = x.shape
    rows = tokens * heads
    if not rows:
        return
    block = 16 if x.is_cuda else 64
    _quantize[(triton.cdiv(rows, block),)](
        x,
        slots,
        into.codes,
        into.params,
        rows,
        heads,
        x.stride(0),
        x.stride(1),
        into.codes.stride(0),
        into.codes.stride(1),
        D=head_dim,
        BITS=into.bits,
        ROWS=block,
        num_warps=4,
    )
