"""The statistics of a KV pool's pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.dispatch import KVLayers, check_page_size

__all__ = ["PageStats"]


@dataclass(frozen=True, eq=False)
class PageStats:
    """Statistics of all pages and layers, in the KV's dtype.

    ``k_min`` and ``k_max`` [layers, pages * page_size / logical_size, kv_heads, head_dim]: per logical page;
    rows of page p begin at p * page_size / logical_size. ``k_center`` [layers, pages, kv_heads, head_dim]:
    the centre of the page's bounding box."""

    k_min: torch.Tensor
    k_max: torch.Tensor
    k_center: torch.Tensor

    @classmethod
    def zeros(cls, kv: KVLayers, page_size: int, logical_size: int) -> PageStats:
        """Room for every whole page of ``kv``. Raises ValueError for a logical size that is no power of two
        dividing the page.
        """
        check_page_size(page_size)
        if logical_size < 1 or logical_size & (logical_size - 1) or logical_size > page_size:
            raise ValueError(
                f"The logical page has {logical_size} tokens; expected a power of two up to the page, {page_size}."
            )
        pages, shape = kv.slots // page_size, (kv.kv_heads, kv.head_dim)
        rows = pages * (page_size // logical_size)
        k_min = torch.zeros(kv.layers, rows, *shape, dtype=kv.dtype, device=kv.device)
        return cls(
            k_min,
            torch.zeros_like(k_min),
            torch.zeros(kv.layers, pages, *shape, dtype=kv.dtype, device=kv.device),
        )

    @property
    def per_page(self) -> int:
        """Logical pages of a page."""
        return self.k_min.shape[1] // self.k_center.shape[1]
