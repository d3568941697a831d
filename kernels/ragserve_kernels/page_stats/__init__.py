"""Statistics of a KV pool's pages, made from the pool: what `page_select` scores. See README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
    use_triton,
)
from ragserve_kernels.kv import KVLayers, check_head_dim, check_page_size
from ragserve_kernels.page_stats import naive
from ragserve_kernels.page_stats.types import PageStats

__all__ = ["PageStats", "page_stats"]


def page_stats(kv: KVLayers, pages: torch.Tensor, into: PageStats, *, page_size: int) -> None:
    """Recompute the statistics of some pages in all layers; other rows stay as they are.

    Nothing waits for the device, so a CUDA graph can capture the call.

    Args:
        kv: the pool; all ``page_size`` slots of a page are read.
        pages: int32 ``[n]``: full pages, distinct; negative ones are skipped.
        into: receives the statistics.
        page_size: tokens per page.

    Raises:
        ValueError, TypeError: shapes, sizes, dtypes or devices that do not fit.
    """
    check_page_size(page_size)
    check_head_dim(kv.head_dim)
    check_dtype("pages", pages, (torch.int32,))
    check_shape("pages", pages, (None,))
    check_same_device(pages, k=kv.k[0])
    n_pages = kv.slots // page_size
    check_shape("into.k_center", into.k_center, (kv.layers, n_pages, kv.kv_heads, kv.head_dim))
    for name, tensor, rows in (
        ("k_min", into.k_min, n_pages * into.per_page),
        ("k_max", into.k_max, n_pages * into.per_page),
        ("k_center", into.k_center, n_pages),
    ):
        check_shape(f"into.{name}", tensor, (kv.layers, rows, kv.kv_heads, kv.head_dim))
        check_dtype(f"into.{name}", tensor, (kv.dtype,))
        check_same_device(pages, **{name: tensor})
        check_contiguous(f"into.{name}", tensor)
    if not len(pages):
        return
    if use_triton(pages):
        from ragserve_kernels.page_stats import triton as kernels

        kernels.page_stats(kv, pages, into, page_size)
    else:
        naive.page_stats(kv, pages, into, page_size)
