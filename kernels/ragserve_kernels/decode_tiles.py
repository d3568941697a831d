# mypy: disable-error-code="no-untyped-def"
"""Triton device functions of the decode kernels: from a step of the walk to pool slots, and from slots to
attention. Import with Triton only.

The walk of a (request, KV head) is over its *virtual* tokens: those of its blocks in the order in which the
index table, the sink-and-local rule or the sequence itself gives them. Head dimensions are handled in two
halves, because a byte of 4-bit KV holds dimensions j and j + D/2. Scores and log-sum-exps are in the base-2
logarithm."""

from __future__ import annotations

import triton
import triton.language as tl

from ragserve_kernels.dot import dot

FULL: tl.constexpr = tl.constexpr(0)
SELECTED: tl.constexpr = tl.constexpr(1)
STREAMING: tl.constexpr = tl.constexpr(2)


@triton.jit
def tile_slots(
    tile,
    n_blocks,
    gap_at,
    gap,
    indexed,
    seq_len,
    index,
    table,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pool slots (int64 [BLOCK_N]) of tile ``tile`` of the walk, and which of them count.

    Step i of the walk is block ``index[i]`` if ``indexed``, else i, moved on by ``gap`` from step ``gap_at``
    on."""
    offsets = tl.arange(0, BLOCK_N)
    if BLOCK % BLOCK_N == 0 and PAGE % BLOCK_N == 0:  # a tile lies in one page: two scalar look-ups
        step = tile * BLOCK_N // BLOCK
        block = step + tl.where(step >= gap_at, gap, 0)
        block = tl.where(indexed, tl.load(index + step, mask=indexed & (step < n_blocks), other=-1), block)
        first = block * BLOCK + tile * BLOCK_N % BLOCK
        some = (step < n_blocks) & (block >= 0) & (first < seq_len)
        page = tl.load(table + first // PAGE, mask=some, other=0).to(tl.int64)
        slots = page * PAGE + first % PAGE + offsets
        ok = some & (first + offsets < seq_len)
    else:
        token = tile * BLOCK_N + offsets
        steps = token // BLOCK
        blocks = steps + tl.where(steps >= gap_at, gap, 0)
        blocks = tl.where(
            indexed, tl.load(index + steps, mask=indexed & (steps < n_blocks), other=-1), blocks
        )
        position = blocks * BLOCK + token % BLOCK
        ok = (steps < n_blocks) & (blocks >= 0) & (position < seq_len)
        pages = tl.load(table + position // PAGE, mask=ok, other=0).to(tl.int64)
        slots = pages * PAGE + position % PAGE
    return slots, ok


# Eight nibbles to bfloat16 without conversions: the byte 0x43 above a nibble u reads as 128 + u, and 136
# (0x4308) less is the code. The compiler does as much for 8 bits by itself, but takes four times the
# instructions for 4.
NIBBLES_TO_BF16: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, b, c;
    mov.b32 c, 0x43084308;
    and.b32 a, $4, 0x0f0f0f0f;
    shr.u32 b, $4, 4;
    and.b32 b, b, 0x0f0f0f0f;
    prmt.b32 $0, a, 0x43434343, 0x4140;
    prmt.b32 $1, a, 0x43434343, 0x4342;
    prmt.b32 $2, b, 0x43434343, 0x4140;
    prmt.b32 $3, b, 0x43434343, 0x4342;
    sub.bf16x2 $0, $0, c;
    sub.bf16x2 $1, $1, c;
    sub.bf16x2 $2, $2, c;
    sub.bf16x2 $3, $3, c;
}""")


@triton.jit
def load_halves(
    base,
    slots,
    ok,
    stride,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Both halves, [BLOCK_N, HALF] each, of the rows at ``slots``: values, or codes where quantised."""
    address = base + slots[:, None] * stride + tl.arange(0, HALF)[None, :]
    if BITS == 4:
        codes = tl.load(address, mask=ok[:, None], other=0)
        if DTYPE == tl.bfloat16 and PRECISION != "upcast":  # noqa: SIM300
            low, high = tl.inline_asm_elementwise(
                NIBBLES_TO_BF16,
                "=r,=r,=r,=r,r",
                [codes],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            low = ((codes & 15).to(tl.float32) - 8.0).to(DTYPE)
            high = ((codes >> 4).to(tl.float32) - 8.0).to(DTYPE)
    else:
        low = tl.load(address, mask=ok[:, None], other=0)
        high = tl.load(address + HALF, mask=ok[:, None], other=0)
        if (
            BITS == 8
            # exact: bfloat16 has 8 bits; by way of float32 because the interpreter cannot make bfloat16 from
            # integers
        ):
            low = low.to(tl.float32).to(DTYPE)
            high = high.to(tl.float32).to(DTYPE)
    return low, high


@triton.jit
def load_params(base, slots, ok, stride):
    """Scale and zero (fp32 [BLOCK_N]) of the rows at ``slots``: float16 pairs, read as one 4-byte word."""
    word = tl.load(base + slots * stride, mask=ok, other=0)
    scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    zero = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def load_query(q, row, group, stride, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """Both halves [BLOCK_M, HALF] of a KV head's query group and their row sums; rows past the group are
    zero.
    """
    heads = tl.arange(0, BLOCK_M)
    address = q + row + heads[:, None] * stride + tl.arange(0, HALF)[None, :]
    ok = (heads < GROUP)[:, None]
    low = tl.load(address, mask=ok, other=0.0)
    high = tl.load(address + HALF, mask=ok, other=0.0)
    return low, high, tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)


@triton.jit
def attend_tile(
    q_low,
    q_high,
    q_sum,
    acc_low,
    acc_high,
    acc_zero,
    b_max,
    b_sum,
    slots,
    ok,
    k,
    v,
    k_params,
    v_params,
    stride_k,
    stride_v,
    stride_kp,
    stride_vp,
    scale,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of online softmax. Returns the scores [BLOCK_M, BLOCK_N] and the new state.

    Quantised K: q . (s c + z) = s (q . c) + z sum(q). Quantised V: sum p (s c + z) = (p s) . c + sum(p z),
    the last term kept in ``acc_zero``."""
    k_low, k_high = load_halves(k, slots, ok, stride_k, HALF, BITS, q_low.dtype, PRECISION)
    scores = tl.zeros([q_low.shape[0], ok.shape[0]], tl.float32)
    scores = dot(q_low, tl.trans(k_low), scores, PRECISION)
    scores = dot(q_high, tl.trans(k_high), scores, PRECISION)
    if BITS > 0:
        k_scale, k_zero = load_params(k_params, slots, ok, stride_kp)
        scores = scores * k_scale[None, :] + q_sum[:, None] * k_zero[None, :]
    scores = tl.where(ok[None, :], scores * scale, float("-inf"))
    new_max = tl.maximum(b_max, tl.max(scores, 1))
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores - safe[:, None])
    alpha = tl.math.exp2(b_max - safe)
    b_sum = b_sum * alpha + tl.sum(p, 1)
    if BITS > 0:
        v_scale, v_zero = load_params(v_params, slots, ok, stride_vp)
        acc_zero = acc_zero * alpha + tl.sum(p * v_zero[None, :], 1)
        p = p * v_scale[None, :]
    # quantised with float16 queries: a weight times a scale can leave float16's range
    dtype: tl.constexpr = tl.bfloat16 if BITS > 0 and q_low.dtype == tl.float16 else q_low.dtype
    v_low, v_high = load_halves(v, slots, ok, stride_v, HALF, BITS, dtype, PRECISION)
    acc_low = dot(p.to(dtype), v_low, acc_low * alpha[:, None], PRECISION)
    acc_high = dot(p.to(dtype), v_high, acc_high * alpha[:, None], PRECISION)
    return scores, acc_low, acc_high, acc_zero, new_max, b_sum
