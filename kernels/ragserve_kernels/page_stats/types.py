"""The statistics of a KV pool's pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.kv import KVLayers, check_page_size
from ragserve_kernels.page_select.types import KeySummary

__all__ = ["PageStats"]


@dataclass(frozen=True, eq=False)
class PageStats:
    """Statistics of all pages and layers, in the KV's dtype.

    Attributes:
        k_min, k_max: ``[layers, pages * per_page, kv_heads, head_dim]``: of each logical page; the rows of
            page p begin at p * per_page.
        k_center: ``[layers, pages, kv_heads, head_dim]``: the centre of the page's bounding box.
        more: how many of the pages, the last ones, are not the pool's.
    """

    k_min: torch.Tensor
    k_max: torch.Tensor
    k_center: torch.Tensor
    more: int = 0

    @classmethod
    def zeros(cls, kv: KVLayers, page_size: int, logical_size: int, more: int = 0) -> PageStats:
        """Return room for every whole page of ``kv``, with logical pages of ``logical_size`` tokens.

        ``more``: pages behind those of ``kv``, whose statistics are kept after the pages themselves are gone.

        Raises:
            ValueError: ``logical_size`` is not a power of two up to the page.
        """
        check_page_size(page_size)
        if logical_size < 1 or logical_size & (logical_size - 1) or logical_size > page_size:
            raise ValueError(
                f"The logical page has {logical_size} tokens; expected a power of two up to the page, "
                f"{page_size}."
            )
        pages, shape = kv.slots // page_size + more, (kv.kv_heads, kv.head_dim)
        rows = pages * (page_size // logical_size)
        k_min = torch.zeros(kv.layers, rows, *shape, dtype=kv.dtype, device=kv.device)
        center = torch.zeros(kv.layers, pages, *shape, dtype=kv.dtype, device=kv.device)
        return cls(k_min, torch.zeros_like(k_min), center, more)

    @property
    def per_page(self) -> int:
        """Logical pages per page."""
        return self.k_min.shape[1] // self.k_center.shape[1]

    def rows(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``k_min`` and ``k_max`` of ``pages`` [n], int64 [n * per_page]."""
        within = torch.arange(self.per_page, device=pages.device)
        return (pages.long()[:, None] * self.per_page + within).flatten()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the statistics of pages ``source`` [n] to pages ``target`` [n], distinct from them."""
        read, written = self.rows(source), self.rows(target)
        for table in (self.k_min, self.k_max):
            for layer in table:  # by layer: an indexed copy of all would take as much memory again
                layer[written] = layer[read]
        for layer in self.k_center:
            layer[target.long()] = layer[source.long()]

    def store(self, layers: int | slice, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """Make the statistics of ``pages``, int64 [n], from their ``keys``.

        ``keys`` [n, page_size, kv_heads, head_dim], with layers in front if ``layers`` is a slice."""
        runs = keys.unflatten(-3, (self.per_page, -1))
        low, high = runs.amin(-3), runs.amax(-3)  # [..., n, per_page, kv_heads, head_dim]
        rows = self.rows(pages)
        self.k_min[layers, rows] = low.flatten(-4, -3)
        self.k_max[layers, rows] = high.flatten(-4, -3)
        self.k_center[layers, pages] = ((low.amin(-3).float() + high.amax(-3).float()) / 2).to(keys.dtype)

    def bounds(self, layer: int | slice) -> KeySummary:
        """Return min and max keys of one layer or several, for ``page_select``."""
        return KeySummary(self.k_max[layer], self.k_min[layer], self.per_page)

    def centers(self, layer: int | slice) -> KeySummary:
        """Return the box centres of one layer or several, for ``page_select``."""
        return KeySummary(self.k_center[layer])
