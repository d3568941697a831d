# mypy: disable-error-code="no-untyped-def"
"""The kernel of ``gather_pages``: a program copies one KV head of K or V of one layer of one page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.kv import KVLayers


@triton.jit
def _gather(
    p_keys,  # int64 [layers]: addresses
    p_values,
    p_slots,  # int64 [pages * PAGE]
    p_pages,  # [pages, 2, layers, kv_heads, PAGE, D]
    n_layers,
    kv_heads,
    PAGE: tl.constexpr,
    D: tl.constexpr,
):
    i_page = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(2)
    i_half = tl.program_id(1) // n_layers
    i_layer = tl.program_id(1) % n_layers
    address = tl.load(p_keys + i_layer) if i_half == 0 else tl.load(p_values + i_layer)
    p_from = tl.multiple_of(address.to(p_pages.dtype), 16)
    o_token, o_dim = tl.arange(0, PAGE), tl.arange(0, D)
    i_slot = tl.load(p_slots + i_page * PAGE + o_token)
    # [PAGE, D]
    o_from = (i_slot * kv_heads + i_head)[:, None] * D + o_dim[None, :]
    b_kv = tl.load(p_from + o_from, mask=(i_slot >= 0)[:, None], other=0.0)
    i_row = ((i_page * 2 + i_half) * n_layers + i_layer) * kv_heads + i_head
    tl.store(p_pages + i_row * (PAGE * D) + o_token[:, None] * D + o_dim[None, :], b_kv)


def gather_pages(kv: KVLayers, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Launch the kernel; see :func:`ragserve_kernels.gather_pages.gather_pages`."""
    count = len(slots) // page_size
    shape = (count, 2, kv.layers, kv.kv_heads, page_size, kv.head_dim)
    pages = torch.empty(shape, dtype=kv.dtype, device=slots.device)
    if count:
        _gather[(count, 2 * kv.layers, kv.kv_heads)](
            kv.k_ptrs, kv.v_ptrs, slots, pages, kv.layers, kv.kv_heads, PAGE=page_size, D=kv.head_dim
        )
    return pages
