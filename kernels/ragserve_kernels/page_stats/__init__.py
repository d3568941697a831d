"""Statistics of a KV pool's pages, made from the pool: what `page_select` scores. See README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import check, use_triton
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
        into: receives the statistics; may have pages behind those of ``kv``.
        page_size: tokens per page.

    Raises:
        ValueError, TypeError: shapes, sizes, dtypes or devices that do not fit.
    """
    check_page_size(page_size)
    check_head_dim(kv.head_dim)
    check("pages", pages, torch.int32, (None,), like=kv.k[0])
    n_pages, heads = kv.slots // page_size + into.more, (kv.kv_heads, kv.head_dim)
    for name, tensor, rows in (
        ("k_center", into.k_center, n_pages),
        ("k_min", into.k_min, n_pages * into.per_page),
        ("k_max", into.k_max, n_pages * into.per_page),
    ):
        check(f"into.{name}", tensor, kv.dtype, (kv.layers, rows, *heads), like=pages, dense=True)
    if not len(pages):
        return
    if use_triton(pages):
        from ragserve_kernels.page_stats import triton as kernels

        kernels.page_stats(kv, pages, into, page_size)
    else:
        naive.page_stats(kv, pages, into, page_size)
