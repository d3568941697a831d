# mypy: disable-error-code="no-untyped-def"
"""Device functions of the decode kernels: from a step of a walk to pool slots, from slots to attention.

Import with Triton only. The walk of a (request, KV head) covers its *virtual* tokens: those of its blocks in
the order that the selection, the sink-and-local rule or the sequence gives. Head dimensions are handled in
two halves, because a byte of 4-bit KV holds dimensions j and j + D/2. Scores and log-sum-exps are base-2
logarithms.

Shapes in comments: M query rows of a group, N tokens of a tile, D head size, H = D / 2."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragserve_kernels.dot import dot
from ragserve_kernels.kv import HeadRows
from ragserve_kernels.paged import KVRows
from ragserve_kernels.quantize_kv.pairs import scale_and_zero

FULL: tl.constexpr = tl.constexpr(0)
SELECTED: tl.constexpr = tl.constexpr(1)
STREAMING: tl.constexpr = tl.constexpr(2)


class Walk(NamedTuple):
    """The blocks of an item. Step i is block ``p_index[i]`` if ``m_indexed``, else block i; from step
    ``i_gap`` on, ``n_gap`` blocks are skipped."""

    n_blocks: Any
    i_gap: Any
    n_gap: Any
    m_indexed: Any
    n_len: Any  # tokens of the request


class QueryGroup(NamedTuple):
    """Halves [M, H] and row sums [M] of a query group."""

    b_low: Any
    b_high: Any
    b_sum: Any


class Softmax(NamedTuple):
    """A running softmax: output halves [M, H], what the zero points add to them [M], maximum and sum [M]."""

    b_low: Any
    b_high: Any
    b_zero: Any
    b_max: Any
    b_sum: Any


@triton.jit
def at_head(rows, i_head):
    """Return the rows of one head."""
    return HeadRows(rows.p + i_head * rows.stride_head, rows.stride, rows.stride_head)


@triton.jit
def kv_at_head(kv, i_head):
    """Return K and V of one KV head."""
    return KVRows(
        at_head(kv.k, i_head),
        at_head(kv.v, i_head),
        at_head(kv.k_params, i_head),
        at_head(kv.v_params, i_head),
    )


@triton.jit
def tile_slots(
    i_tile, walk, p_index, p_table, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the pool slots of a tile of a :class:`Walk`, int64 [N], and which of them count, bool [N]."""
    n_blocks, i_gap, n_gap, m_indexed, n_len = walk
    o_token = tl.arange(0, BLOCK_N)
    if BLOCK % BLOCK_N == 0 and PAGE % BLOCK_N == 0:  # a tile lies in one page: two scalar look-ups
        i_step = i_tile * BLOCK_N // BLOCK
        i_block = i_step + tl.where(i_step >= i_gap, n_gap, 0)
        i_block = tl.where(
            m_indexed, tl.load(p_index + i_step, mask=m_indexed & (i_step < n_blocks), other=-1), i_block
        )
        i_first = i_block * BLOCK + i_tile * BLOCK_N % BLOCK
        m_tile = (i_step < n_blocks) & (i_block >= 0) & (i_first < n_len)
        i_page = tl.load(p_table + i_first // PAGE, mask=m_tile, other=0).to(tl.int64)
        i_slot = i_page * PAGE + i_first % PAGE + o_token
        m_slot = m_tile & (i_first + o_token < n_len)
    else:
        i_token = i_tile * BLOCK_N + o_token
        i_step = i_token // BLOCK
        i_block = i_step + tl.where(i_step >= i_gap, n_gap, 0)
        # [N]
        i_block = tl.where(
            m_indexed, tl.load(p_index + i_step, mask=m_indexed & (i_step < n_blocks), other=-1), i_block
        )
        i_position = i_block * BLOCK + i_token % BLOCK
        m_slot = (i_step < n_blocks) & (i_block >= 0) & (i_position < n_len)
        # [N]
        i_page = tl.load(p_table + i_position // PAGE, mask=m_slot, other=0).to(tl.int64)
        i_slot = i_page * PAGE + i_position % PAGE
    return i_slot, m_slot


# Eight nibbles to bfloat16 without conversions: the byte 0x43 above a nibble u reads as 128 + u, and
# subtracting 136 (0x4308) gives the code. The compiler does as well for 8 bits by itself, but takes four
# times the instructions for 4.
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
    rows,
    i_slot,
    m_slot,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return both halves, [N, H] each, of the rows at ``i_slot``: values, or codes where quantised."""
    p_half = rows.p + i_slot[:, None] * rows.stride + tl.arange(0, HALF)[None, :]
    if BITS == 4:
        # [N, H], two codes a byte
        b_codes = tl.load(p_half, mask=m_slot[:, None], other=0)
        if DTYPE == tl.bfloat16 and PRECISION != "upcast":  # noqa: SIM300
            b_low, b_high = tl.inline_asm_elementwise(
                NIBBLES_TO_BF16,
                "=r,=r,=r,=r,r",
                [b_codes],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            b_low = ((b_codes & 15).to(tl.float32) - 8.0).to(DTYPE)
            b_high = ((b_codes >> 4).to(tl.float32) - 8.0).to(DTYPE)
    else:
        # [N, H] each
        b_low = tl.load(p_half, mask=m_slot[:, None], other=0)
        b_high = tl.load(p_half + HALF, mask=m_slot[:, None], other=0)
        # exact, bfloat16 holds 8 bits; by way of float32, as the interpreter cannot make bfloat16 from
        # integers
        if BITS == 8:
            b_low = b_low.to(tl.float32).to(DTYPE)
            b_high = b_high.to(tl.float32).to(DTYPE)
    return b_low, b_high


@triton.jit
def load_params(params, i_slot, m_slot):
    """Return scale and zero point, float32 [N] each: a float16 pair in a 4-byte word."""
    # [N]
    return scale_and_zero(tl.load(params.p + i_slot * params.stride, mask=m_slot, other=0))


@triton.jit
def load_query(q, i_b, i_h, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """Return the :class:`QueryGroup` of a request and KV head; rows past the group are zero."""
    o_head = tl.arange(0, BLOCK_M)
    p_group = q.p + i_b * q.stride + i_h * GROUP * q.stride_head
    p_half = p_group + o_head[:, None] * q.stride_head + tl.arange(0, HALF)[None, :]
    m_head = (o_head < GROUP)[:, None]
    # [M, H] each
    b_low = tl.load(p_half, mask=m_head, other=0.0)
    b_high = tl.load(p_half + HALF, mask=m_head, other=0.0)
    return QueryGroup(b_low, b_high, tl.sum(b_low.to(tl.float32), 1) + tl.sum(b_high.to(tl.float32), 1))


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """Return the :class:`Softmax` over no tokens."""
    b_zero = tl.zeros([BLOCK_M], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_acc = tl.zeros([BLOCK_M, HALF], tl.float32)
    return Softmax(b_acc, b_acc, b_zero, b_max, b_zero)


@triton.jit
def fold_scores(b_s, m_row, scale_2, b_max, b_sum):
    """Fold products of queries and keys, [M, N], into a running softmax.

    Return scores, -inf where a row of ``m_row`` is none, weights [M, N], what the output so far shrinks to,
    and the new maximum and sum, [M] each."""
    b_s = tl.where(m_row[None, :], b_s * scale_2, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # a row without tokens so far: exp2(-inf - 0) = 0, not NaN
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.math.exp2(b_s - b_base[:, None])
    b_decay = tl.math.exp2(b_max - b_base)
    return b_s, b_p, b_decay, b_new, b_sum * b_decay + tl.sum(b_p, 1)


@triton.jit
def attend_tile(
    query,
    softmax,
    kv,
    i_slot,
    m_slot,
    scale_2,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold one tile of a :class:`KVRows` into the softmax; return its scores [M, N] and the new softmax.

    Quantised K: q . (s c + z) = s (q . c) + z sum(q). Quantised V: sum p (s c + z) = (p s) . c + sum(p z),
    with the last term kept in ``b_zero``."""
    b_low, b_high, b_acc_zero, b_max, b_sum = softmax
    DTYPE: tl.constexpr = query.b_low.dtype
    b_k_low, b_k_high = load_halves(kv.k, i_slot, m_slot, HALF, BITS, DTYPE, PRECISION)
    b_s = tl.zeros([query.b_low.shape[0], m_slot.shape[0]], tl.float32)
    b_s = dot(query.b_low, tl.trans(b_k_low), b_s, PRECISION)
    b_s = dot(query.b_high, tl.trans(b_k_high), b_s, PRECISION)
    if BITS > 0:
        b_k_scale, b_k_zero = load_params(kv.k_params, i_slot, m_slot)
        b_s = b_s * b_k_scale[None, :] + query.b_sum[:, None] * b_k_zero[None, :]
    b_s, b_p, b_decay, b_new, b_sum = fold_scores(b_s, m_slot, scale_2, b_max, b_sum)
    if BITS > 0:
        b_v_scale, b_v_zero = load_params(kv.v_params, i_slot, m_slot)
        b_acc_zero = b_acc_zero * b_decay + tl.sum(b_p * b_v_zero[None, :], 1)
        b_p = b_p * b_v_scale[None, :]
    # quantised with float16 queries: a weight times a scale can leave float16's range
    WEIGHTS: tl.constexpr = tl.bfloat16 if BITS > 0 and DTYPE == tl.float16 else DTYPE  # noqa: SIM300
    b_v_low, b_v_high = load_halves(kv.v, i_slot, m_slot, HALF, BITS, WEIGHTS, PRECISION)
    b_low = dot(b_p.to(WEIGHTS), b_v_low, b_low * b_decay[:, None], PRECISION)
    b_high = dot(b_p.to(WEIGHTS), b_v_high, b_high * b_decay[:, None], PRECISION)
    return b_s, Softmax(b_low, b_high, b_acc_zero, b_new, b_sum)
