"""Page statistics of a paged KV cache, made again from the pool for the pages named: what `page_select`
scores. See README.md.
"""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import (
    KVLayers,
    check_dtype,
    check_head_dim,
    check_page_size,
    check_same_device,
    check_shape,
    use_triton,
)
from ragserve_kernels.page_stats import naive
from ragserve_kernels.page_stats.types import PageStats

__all__ = ["PageStats", "page_stats"]


def page_stats(kv: KVLayers, pages: torch.Tensor, into: PageStats, *, page_size: int) -> None:
    """Recompute the statistics of ``pages`` in all layers from all their ``page_size`` slots; other rows stay
    as they are.

    ``pages`` int32 [n], full pages, distinct; negative ones are skipped. Nothing here waits for the device,
    so a CUDA graph can capture it. Raises ``ValueError`` and ``TypeError``."""
    check_page_size(page_size)
    check_head_dim(kv.head_dim)
    check_dtype("pages", pages, (torch.int32,))
    check_shape("pages", pages, (None,))
    check_same_device(pages, k=kv.k[0], k_min=into.k_min, k_max=into.k_max, k_center=into.k_center)
    check_shape("into.k_center", into.k_center, (kv.layers, kv.slots // page_size, kv.kv_heads, kv.head_dim))
    rows = into.k_center.shape[1] * into.per_page
    for name, tensor in (("k_min", into.k_min), ("k_max", into.k_max)):
        check_shape(f"into.{name}", tensor, (kv.layers, rows, kv.kv_heads, kv.head_dim))
    for name, tensor in (("k_min", into.k_min), ("k_max", into.k_max), ("k_center", into.k_center)):
        check_dtype(f"into.{name}", tensor, (kv.dtype,))
        if not tensor.is_contiguous():
            raise ValueError(f"into.{name} must be contiguous.")
    if not len(pages):
        return
    if use_triton(pages):
        from ragserve_kernels.page_stats import triton as kernels

        kernels.page_stats(kv, pages, into, page_size)
    else:
        naive.page_stats(kv, pages, into, page_size)
