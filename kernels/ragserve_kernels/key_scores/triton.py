# mypy: disable-error-code="no-untyped-def"
"""``key_scores`` in Triton: a tile of keys of one KV head is read once, for its whole query group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.decode_tiles import at_head
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.dot import dot, dot_precision
from ragserve_kernels.kv import rows_of

_KEYS = 128  # of a program


@triton.jit(do_not_specialize=["n_slots"], do_not_specialize_on_alignment=["p_q", "p_slots", "p_out"])
def key_scores_kernel(
    p_q,  # [Hq, D]
    k,  # HeadRows of [slots, Hkv, D]
    p_slots,  # int64 [N]
    p_out,  # float32 [Hq, N], contiguous
    n_slots,  # N
    stride_q,
    scale,
    GROUP: tl.constexpr,
    B_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_kv_head = tl.program_id(0)
    o_slot = tl.program_id(1) * B_KEYS + tl.arange(0, B_KEYS)
    m_slot = o_slot < n_slots
    o_head = tl.arange(0, B_HEADS)
    m_head = o_head < GROUP
    o_dim = tl.arange(0, HEAD_DIM)
    i_head = i_kv_head * GROUP + o_head
    # [M, D]
    b_q = tl.load(p_q + i_head[:, None] * stride_q + o_dim[None, :], mask=m_head[:, None], other=0.0)
    # [N]
    i_slot = tl.load(p_slots + o_slot, mask=m_slot, other=0)
    k = at_head(k, i_kv_head.to(tl.int64))
    # [D, N]
    b_k = tl.load(k.p + i_slot[None, :] * k.stride + o_dim[:, None], mask=m_slot[None, :], other=0.0)
    b_s = dot(b_q, b_k, tl.zeros([B_HEADS, B_KEYS], tl.float32), PRECISION) * scale
    p_row = p_out + i_head.to(tl.int64)[:, None] * n_slots + o_slot[None, :]
    tl.store(p_row, b_s, mask=m_head[:, None] & m_slot[None, :])


def key_scores_triton(
    q: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """Launch the kernel; see :func:`ragserve_kernels.key_scores.key_scores`."""
    heads, kv_heads = q.shape[0], k.shape[1]
    key_scores_kernel[(kv_heads, triton.cdiv(len(slots), _KEYS))](
        q,
        rows_of(k),
        slots,
        out,
        len(slots),
        q.stride(0),
        scale,
        GROUP=heads // kv_heads,
        B_HEADS=max(16, next_power_of_2(heads // kv_heads)),
        HEAD_DIM=q.shape[1],
        B_KEYS=_KEYS,
        PRECISION=dot_precision(q.dtype),
        num_warps=4,
    )
