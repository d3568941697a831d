"""A pool of pages: values as the model left them, or 8-bit codes with a scale and a zero point per row.

A row is one token's K or V of one KV head in one layer: a page needs nothing from outside itself, and a rank
nothing from another. A page of codes has the codes of all its rows, in the order of the values, and behind
them a float16 pair for each row, in the same order. All pages have one size: storage moves bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.kv import HEAD_DIMS
from ragserve_kernels.quantize_kv import QuantizedKV, quantize_kv
from ragserve_kernels.quantize_kv import naive as plain
from sglang_ext.documents.pages.types import KvShape


@dataclass(frozen=True, eq=False)
class StoredPages:
    """``pool``: ``[pages, *shape.page_shape]`` of ``shape.page_dtype``."""

    pool: torch.Tensor
    shape: KvShape

    def __len__(self) -> int:
        return len(self.pool)

    @classmethod
    def of(cls, values: torch.Tensor, shape: KvShape) -> StoredPages:
        """Turn values ``[pages, *shape.block_shape]`` into pages on the same device; of 16 bits, the values
        themselves."""
        if shape.bits != 8:
            return cls(values, shape)
        pages = cls(shape.empty_pages(len(values), device=values.device), shape)
        codes, pairs = pages._codes(), pages._pairs()
        quantize = quantize_kv if shape.head_dim in HEAD_DIMS else plain.quantize_kv
        numbers = torch.arange(len(values), device=values.device)
        rows = values.view(len(values), -1, shape.head_dim)
        # one launch where there is a kernel; plain torch makes wide temporaries: it takes a head of a layer
        step = rows.shape[1] if values.is_cuda and shape.head_dim in HEAD_DIMS else shape.block
        for at in range(0, rows.shape[1], step):
            some = slice(at, at + step)
            params = torch.empty((len(values), step, 2), dtype=torch.float16, device=values.device)
            quantize(rows[:, some], numbers, QuantizedKV(codes[:, some], params, bits=8))
            pairs[:, some] = params
        return pages

    def read(self, layer: int, page: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V ``[n, kv_heads, head_dim]`` of tokens, given by int64 [n] page and place in it;
        codes as float32."""
        sizes = self.shape.block_shape
        if self.shape.bits != 8:
            k, v = (self.pool[:, half, layer][page, :, token] for half in (0, 1))
            return k, v
        codes, pairs = self._codes().unflatten(1, sizes[:-1]), self._pairs().unflatten(1, sizes[:-1])
        k, v = (
            plain.dequantize(codes[:, half, layer][page, :, token], pairs[:, half, layer][page, :, token])
            for half in (0, 1)
        )
        return k, v

    @property
    def stride(self) -> int:
        """Elements from one page to the next in `arenas`."""
        return self.shape.page_bytes // self.shape.page_dtype.itemsize

    def arenas(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return K and V from a layer on, and their pairs if they are codes, as `HostSource` takes them: page
        ``p`` begins at element ``p * stride`` of all of them, of words at a quarter of that."""
        shape, rows = self.shape, self.shape.page_rows // 2
        first = layer * shape.kv_heads * shape.block
        flat = self.pool.view(-1)
        if shape.bits != 8:
            return flat[first * shape.head_dim :], flat[(rows + first) * shape.head_dim :], None
        codes, words = flat.view(torch.int8), flat.view(torch.int32)[2 * rows * shape.head_dim // 4 :]
        pairs = words[first:], words[rows + first :]
        return codes[first * shape.head_dim :], codes[(rows + first) * shape.head_dim :], pairs

    def _codes(self) -> torch.Tensor:
        """int8 [pages, rows, head_dim], sharing memory."""
        codes = self.pool[:, : self.shape.page_rows * self.shape.head_dim].view(torch.int8)
        return codes.unflatten(1, (self.shape.page_rows, self.shape.head_dim))

    def _pairs(self) -> torch.Tensor:
        """float16 [pages, rows, 2], sharing memory."""
        pairs = self.pool[:, self.shape.page_rows * self.shape.head_dim :].view(torch.float16)
        return pairs.unflatten(1, (self.shape.page_rows, 2))
