"""Put K and V of slots in all layers together as pages, in one launch. See README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.gather_pages.naive import gather_pages_naive
from ragserve_kernels.kv import KVLayers, check_head_dim, check_page_size

__all__ = ["gather_pages", "gather_pages_naive"]


def gather_pages(kv: KVLayers, slots: torch.Tensor, *, page_size: int) -> torch.Tensor:
    """Return new pages ``[n / page_size, 2 (K, V), layers, kv_heads, page_size, head_dim]`` on the device.

    Nothing waits for the device.

    Args:
        slots: int64 ``[n]``, page after page; a negative one gives zeros. Values are not checked.
        page_size: tokens per page, which divide n.

    Raises:
        ValueError, TypeError: sizes, dtypes or devices that do not fit.
    """
    check_page_size(page_size)
    check_head_dim(kv.head_dim)
    check("slots", slots, torch.int64, (None,), like=kv.k[0], dense=True)
    if len(slots) % page_size:
        raise ValueError(f"{len(slots)} slots; expected whole pages of {page_size}.")
    if not use_triton(slots):
        return gather_pages_naive(kv.k, kv.v, slots, page_size=page_size)
    from ragserve_kernels.gather_pages import triton as kernels

    return kernels.gather_pages(kv, slots, page_size)
