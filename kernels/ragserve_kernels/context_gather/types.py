"""Host pages of 8-bit codes, as `context_gather` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.dispatch import check

PAIR_BYTES = 4  # a float16 scale and zero point


@dataclass(frozen=True, eq=False, slots=True)
class HostCodes:
    """Pages of codes of ``[2 (K, V), layers, kv_heads, block, head_dim]`` values, in host memory.

    Attributes:
        pool: uint8 ``[pages, page_bytes]``, contiguous: a page has the codes of its rows, int8, and behind
            them a scale and a zero point for each row, float16, in the same order.
    """

    pool: torch.Tensor
    layers: int
    kv_heads: int
    block: int
    head_dim: int

    def check(self) -> None:
        """Raise ValueError or TypeError if the pool does not have this form."""
        check("host", self.pool, torch.uint8, (None, self.rows * (self.head_dim + PAIR_BYTES)), dense=True)

    @property
    def rows(self) -> int:
        """Rows of ``head_dim`` codes in a page."""
        return 2 * self.layers * self.kv_heads * self.block

    @property
    def codes(self) -> torch.Tensor:
        """int8 ``[pages, 2, layers, kv_heads, block, head_dim]``, sharing memory."""
        codes = self.pool[:, : self.rows * self.head_dim].view(torch.int8)
        return codes.unflatten(1, (2, self.layers, self.kv_heads, self.block, self.head_dim))

    @property
    def pairs(self) -> torch.Tensor:
        """float16 ``[pages, 2, layers, kv_heads, block, 2]``, sharing memory."""
        pairs = self.pool[:, self.rows * self.head_dim :].view(torch.float16)
        return pairs.unflatten(1, (2, self.layers, self.kv_heads, self.block, 2))
