# mypy: disable-error-code="no-untyped-def"
"""The stopping rule of progressive attention on the device: see README.md. Import with Triton only.

Shapes in comments: M query rows of a group, N tokens of a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lse(b_x, AXIS: tl.constexpr):
    """Return log2 of the sum of exp2 along ``AXIS``; -inf for nothing."""
    b_max = tl.max(b_x, AXIS)
    b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.sum(tl.math.exp2(b_x - tl.expand_dims(b_base, AXIS)), AXIS)
    return tl.where(b_sum > 0.0, b_base + tl.math.log2(tl.where(b_sum > 0.0, b_sum, 1.0)), float("-inf"))


@triton.jit
def estimate(
    p_state, i_item, n_left, n_ranked, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, MEAN: tl.constexpr
):
    """Return P per head, [M], from a round's state: maximum, sum, and the bound's part.

    The bound's part is the lowest block so far or, with ``MEAN``, the log sum of the round's ``n_ranked``
    blocks."""
    o_state = tl.arange(0, SPLITS)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    p_item = p_state + i_item.to(tl.int64) * (3 * SPLITS * BLOCK_M)
    # [SPLITS, M] each
    b_max = tl.load(p_item + o_state)
    b_sum = tl.load(p_item + SPLITS * BLOCK_M + o_state)
    b_part = tl.load(p_item + 2 * SPLITS * BLOCK_M + o_state)
    if MEAN:
        b_each = tl.where(
            n_ranked > 0, lse(b_part, 0) - tl.math.log2(tl.maximum(n_ranked, 1).to(tl.float32)), float("inf")
        )
    else:
        b_each = tl.min(b_part, 0)
    m_some = b_sum > 0.0
    b_seen = lse(tl.where(m_some, b_max + tl.math.log2(tl.where(m_some, b_sum, 1.0)), float("-inf")), 0)
    # 1 / (1 + 2^(each + log2 left - seen)); each is +inf while only forced blocks were attended to
    b_share = 1.0 / (1.0 + tl.math.exp2(b_each + tl.math.log2(tl.maximum(n_left, 1).to(tl.float32)) - b_seen))
    return tl.where(n_left <= 0, 1.0, b_share)


@triton.jit
def bounded(
    b_s,
    b_part,
    b_within,
    i_tile,
    n_forced,
    i_until,
    PER_TILE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
    SOME: tl.constexpr,  # only blocks that the tile has scores of count
):
    """Return the bound's part with the blocks of a tile of scores, [M, N], and the log sum of the block at
    hand."""
    BLOCK_M: tl.constexpr = b_s.shape[0]
    b_log = lse(tl.reshape(b_s, (BLOCK_M, PER_TILE, b_s.shape[1] // PER_TILE)), 2)
    o_rank = i_tile // PER_BLOCK * PER_TILE + tl.arange(0, PER_TILE)
    m_counted = ((o_rank >= n_forced) & (o_rank < i_until))[None, :]
    if PER_BLOCK > 1:
        m_fresh = i_tile % PER_BLOCK == 0
        b_within = lse(tl.join(b_log, tl.where(m_fresh, float("-inf"), b_within)), 2)
        b_log = b_within
        m_counted = m_counted & ((i_tile + 1) % PER_BLOCK == 0)
    if SOME:
        m_counted = m_counted & (b_log > float("-inf"))
    if MEAN:
        b_added = lse(tl.where(m_counted, b_log, float("-inf")), 1)
        b_part = lse(tl.join(b_part, b_added), 1)
    else:
        b_part = tl.minimum(b_part, tl.min(tl.where(m_counted, b_log, float("inf")), 1))
    return b_part, b_within
