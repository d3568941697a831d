# mypy: disable-error-code="no-untyped-def"
"""``key_scores`` in Triton: a tile of keys of a request is read once, for a KV head's whole query group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import at_head
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.dot import dot, dot_precision
from ragserve_kernels.kv import rows_of

_KEYS = 128  # of a program


@triton.jit(
    do_not_specialize=["width"], do_not_specialize_on_alignment=["p_q", "p_slots", "p_starts", "p_out"]
)
def key_scores_kernel(
    p_q,  # [R, Hq, D]
    k,  # HeadRows of [slots, Hkv, D]
    p_slots,  # int64 [N]
    p_starts,  # int32 [R + 1]
    p_out,  # float32 [R, Hq, W], contiguous
    width,  # W
    stride_q_request,
    stride_q_head,
    scale,
    GROUP: tl.constexpr,
    B_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_kv_head = tl.program_id(0)
    i_request = tl.program_id(2).to(tl.int64)
    i_start = tl.load(p_starts + i_request)
    n_slots = tl.load(p_starts + i_request + 1) - i_start
    o_slot = tl.program_id(1) * B_KEYS + tl.arange(0, B_KEYS)
    m_slot = o_slot < n_slots
    o_head = tl.arange(0, B_HEADS)
    m_head = o_head < GROUP
    o_dim = tl.arange(0, HEAD_DIM)
    i_head = i_kv_head * GROUP + o_head
    # [M, D]
    p_own = p_q + i_request * stride_q_request + i_head[:, None] * stride_q_head
    b_q = tl.load(p_own + o_dim[None, :], mask=m_head[:, None], other=0.0)
    # [N]
    i_slot = tl.load(p_slots + i_start.to(tl.int64) + o_slot, mask=m_slot, other=0)
    k = at_head(k, i_kv_head.to(tl.int64))
    # [D, N]
    b_k = tl.load(k.p + i_slot[None, :] * k.stride + o_dim[:, None], mask=m_slot[None, :], other=0.0)
    b_s = dot(b_q, b_k, tl.zeros([B_HEADS, B_KEYS], tl.float32), PRECISION) * scale
    b_s = tl.where(m_slot[None, :], b_s, float("-inf"))
    i_row = i_request * tl.num_programs(0) * GROUP + i_head  # of R * Hq
    p_row = p_out + i_row[:, None] * width + o_slot[None, :]
    tl.store(p_row, b_s, mask=m_head[:, None] & (o_slot < width)[None, :])


def key_scores_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.key_scores.key_scores`."""
    (requests, heads, width), kv_heads = out.shape, k.shape[1]
    key_scores_kernel[(kv_heads, triton.cdiv(width, _KEYS), requests)](
        q,
        rows_of(k),
        slots,
        starts,
        out,
        width,
        q.stride(0),
        q.stride(1),
        scale,
        GROUP=heads // kv_heads,
        B_HEADS=max(16, next_power_of_2(heads // kv_heads)),
        HEAD_DIM=q.shape[2],
        B_KEYS=_KEYS,
        PRECISION=dot_precision(q.dtype),
        num_warps=4,
    )
