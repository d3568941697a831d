# mypy: disable-error-code="no-untyped-def"
"""The inner step of flash attention, for rows that see keys up to a position. Import with Triton only.

Shapes in comments: M rows of queries, N keys of a tile, D head size."""

from __future__ import annotations

import triton
import triton.language as tl

from ragserve_kernels.dot import dot


@triton.jit
def fold_tile(
    state,  # float32: output [M, D]; maximum, of scores in base 2, and sum [M]
    b_q,  # [M, D]
    k,  # HeadRows of one KV head
    v,
    i_slot,  # int64 [N]
    i_key,  # int32 [N]
    m_key,  # bool [N]: keys that are there
    i_last,  # int32 [M]: the last key that a row attends to; below 0: none
    scale_2,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold one tile of keys into the running softmax; without ``MASKED`` every row attends to all of them.

    Scores and their maximum are base-2 logarithms."""
    b_acc, b_max, b_sum = state
    o_dim = tl.arange(0, HEAD_DIM)
    # [D, N]
    if MASKED:
        b_k = tl.load(k.p + i_slot[None, :] * k.stride + o_dim[:, None], mask=m_key[None, :], other=0.0)
    else:
        b_k = tl.load(k.p + i_slot[None, :] * k.stride + o_dim[:, None])
    b_s = dot(b_q, b_k, tl.zeros([b_q.shape[0], i_slot.shape[0]], tl.float32), PRECISION)
    if MASKED:
        b_s = tl.where(i_key[None, :] <= i_last[:, None], b_s, -float("inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_2)
    # a row without keys so far: exp2(-inf - 0) = 0, not NaN
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED else b_new
    b_p = tl.exp2(b_s * scale_2 - b_base[:, None])
    b_decay = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    # [N, D]
    if MASKED:
        b_v = tl.load(v.p + i_slot[:, None] * v.stride + o_dim[None, :], mask=m_key[:, None], other=0.0)
    else:
        b_v = tl.load(v.p + i_slot[:, None] * v.stride + o_dim[None, :])
    b_acc = dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], PRECISION)
    return b_acc, b_new, b_sum
