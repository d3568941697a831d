# mypy: disable-error-code="no-untyped-def"
"""Device function of the kernels that read contexts in documents' host pages. Import with Triton only."""

from __future__ import annotations

import triton
import triton.language as tl

from ragserve_kernels.quantize_kv.pairs import scale_and_zero


@triton.jit
def context_rows(
    p_host,  # [pages, 2, n_heads, BLOCK, D], and PAIR bytes more a row with CODES
    p_pairs,  # int32: the same memory in words; read with CODES
    p_turns,  # float32 [n, 2, HALF]
    i_row,  # int64 [N]: host page * BLOCK + place in it
    i_turn,  # int64 [N]: row of the angles
    m_row,  # bool [N]: rows that are read; others are 0
    i_from,  # int64, one or [N]: layer * KV heads + head
    n_heads,  # int64: layers times KV heads, those of K, or V, of a page
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    B_HALF: tl.constexpr,  # HALF, rounded up
    B_REST: tl.constexpr,  # the dimensions that do not rotate, rounded up; 0: none
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,  # the pages hold 8-bit codes
    PAIR: tl.constexpr,  # bytes of a row's scale and zero point
):
    """Return K, turned, in its two halves [N, B_HALF] that rotate and the rest [N, B_REST], and V [N, D], of
    DTYPE; without a rest another tensor in its place."""
    # half a row of codes is less than the link moves at once
    WHOLE: tl.constexpr = CODES and 2 * HALF == D
    o_dim = tl.arange(0, D)
    o_half = tl.arange(0, B_HALF)
    n_row = n_heads * BLOCK  # rows of K lie so many before those of V
    i_block = i_row // BLOCK
    i_place = i_from * BLOCK + i_row % BLOCK
    if CODES:
        o_page = i_block * 2 * n_row * (D + PAIR)
        o_pair = o_page // 4 + 2 * n_row * D // 4 + i_place
    else:
        o_page = i_block * 2 * n_row * D
    o_k = tl.multiple_of(o_page + i_place * D, 16)
    o_v = tl.multiple_of(o_k + n_row * D, 16)
    m_all = m_row[:, None]
    m_half = m_all & (o_half < HALF)[None, :]
    # all loads before their first use
    if WHOLE:
        b_k = tl.load(p_host + o_k[:, None] + o_dim[None, :], mask=m_all, other=0)
    else:
        b_1 = tl.load(p_host + o_k[:, None] + o_half[None, :], mask=m_half, other=0)
        b_2 = tl.load(p_host + o_k[:, None] + HALF + o_half[None, :], mask=m_half, other=0)
    if CODES:
        # [N] each
        b_k_pair = tl.load(p_pairs + o_pair, mask=m_row, other=0)
        b_v_pair = tl.load(p_pairs + o_pair + n_row, mask=m_row, other=0)
    b_v = tl.load(p_host + o_v[:, None] + o_dim[None, :], mask=m_all, other=0)
    p_turn = p_turns + i_turn[:, None] * (2 * HALF) + o_half[None, :]
    b_cos = tl.load(p_turn, mask=m_half, other=1.0)
    b_sin = tl.load(p_turn + HALF, mask=m_half, other=0.0)
    b_rest = b_v
    if B_REST > 0:
        o_rest = 2 * HALF + tl.arange(0, B_REST)
        m_rest = m_all & (o_rest < D)[None, :]
        b_rest = tl.load(p_host + o_k[:, None] + o_rest[None, :], mask=m_rest, other=0)
        if CODES:
            b_scale, b_zero = scale_and_zero(b_k_pair)
            b_rest = (b_rest.to(tl.float32) * b_scale[:, None] + b_zero[:, None]).to(DTYPE)
    if WHOLE:
        b_1, b_2 = tl.split(tl.permute(tl.reshape(b_k, [b_k.shape[0], 2, D // 2]), [0, 2, 1]))
    b_1 = b_1.to(tl.float32)
    b_2 = b_2.to(tl.float32)
    if CODES:
        b_scale, b_zero = scale_and_zero(b_k_pair)
        b_1 = b_1 * b_scale[:, None] + b_zero[:, None]
        b_2 = b_2 * b_scale[:, None] + b_zero[:, None]
        b_scale, b_zero = scale_and_zero(b_v_pair)
        b_v = (b_v.to(tl.float32) * b_scale[:, None] + b_zero[:, None]).to(DTYPE)
    b_turned = (b_1 * b_cos - b_2 * b_sin).to(DTYPE)
    return b_turned, (b_2 * b_cos + b_1 * b_sin).to(DTYPE), b_rest, b_v


@triton.jit
def store_context_rows(
    p_k,  # [N]: where rows go
    p_v,
    b_1,  # as `context_rows` returns them
    b_2,
    b_rest,
    b_v,
    m_row,  # bool [N, 1]: rows that are stored
    D: tl.constexpr,
    HALF: tl.constexpr,
    B_HALF: tl.constexpr,
    B_REST: tl.constexpr,
):
    """Store rows of K and V."""
    o_half = tl.arange(0, B_HALF)
    m_half = m_row & (o_half < HALF)[None, :]
    p_half = p_k[:, None] + o_half[None, :]
    tl.store(p_half, b_1, mask=m_half)
    tl.store(p_half + HALF, b_2, mask=m_half)
    if B_REST > 0:
        o_rest = 2 * HALF + tl.arange(0, B_REST)
        tl.store(p_k[:, None] + o_rest[None, :], b_rest, mask=m_row & (o_rest < D)[None, :])
    tl.store(p_v[:, None] + tl.arange(0, D)[None, :], b_v, mask=m_row)
