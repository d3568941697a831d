"""KV caches as kernels see them: supported sizes, and a pool's buffers behind pointer tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, check

__all__ = [
    "HEAD_DIMS",
    "PAGE_SIZES",
    "HeadRows",
    "KVLayers",
    "check_head_dim",
    "check_page_size",
    "query_group",
    "rows_of",
]

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128)


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError for a head size that the kernels do not support."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"Head size {head_dim} is not supported; expected one of {HEAD_DIMS}.")


def check_page_size(page_size: int) -> None:
    """Raise ValueError for a page size that the kernels do not support."""
    if page_size not in PAGE_SIZES:
        raise ValueError(f"Page size {page_size} is not supported; expected one of {PAGE_SIZES}.")


def query_group(query_heads: int, kv_heads: int) -> int:
    """Return the number of query heads per KV head. Raise ValueError if they do not divide."""
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads.")
    return query_heads // kv_heads


class HeadRows(NamedTuple):
    """A tensor ``[rows, heads, ...]`` as kernels take it, with strides in elements."""

    p: Any
    stride: Any
    stride_head: Any


def rows_of(tensor: torch.Tensor) -> HeadRows:
    """Return a tensor, whose last dimension is contiguous, as an argument of a kernel."""
    return HeadRows(tensor, tensor.stride(0), tensor.stride(1))


@dataclass(frozen=True, eq=False)
class KVLayers:
    """K and V of all layers, each ``[slots, kv_heads, head_dim]``, with pointer tables for kernels.

    This is the layout of SGLang's ``MHATokenToKVPool`` (``KVLayers(pool.k_buffer, pool.v_buffer)``). Build it
    once: the tables are copied to the device, which a CUDA graph cannot capture. The object keeps the tensors
    alive."""

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    k_ptrs: torch.Tensor = field(init=False)  # int64 [layers], on the tensors' device
    v_ptrs: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        if not self.k or len(self.k) != len(self.v):
            raise ValueError(
                f"KVLayers got {len(self.k)} K and {len(self.v)} V tensors; expected one of each per layer."
            )
        first = self.k[0]
        check("k[0]", first, FLOAT_DTYPES, (None, None, None))
        for name, tensors in (("k", self.k), ("v", self.v)):
            for i, tensor in enumerate(tensors):
                if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
                    raise ValueError(f"{name}[{i}] differs from k[0] in shape, dtype or device.")
                if not tensor.is_contiguous():
                    raise ValueError(f"{name}[{i}] is not contiguous.")
                if tensor.data_ptr() % 16:
                    raise ValueError(
                        f"{name}[{i}] is not aligned to 16 bytes; kernels load 16 bytes at a time."
                    )
            addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
            object.__setattr__(self, f"{name}_ptrs", addresses.to(first.device))

    @property
    def layout(self) -> tuple[int, int, int, torch.dtype]:
        """Layers, KV heads, head size and dtype."""
        return self.layers, self.kv_heads, self.head_dim, self.dtype

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def slots(self) -> int:
        return self.k[0].shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k[0].shape[1]

    @property
    def head_dim(self) -> int:
        return self.k[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.k[0].dtype

    @property
    def device(self) -> torch.device:
        return self.k[0].device


def check_host_pages(host: torch.Tensor, dst: KVLayers) -> None:
    """Raise TypeError or ValueError if ``host`` are not host pages that can be loaded into ``dst``: ``[pages,
    2 (K, V), layers, kv_heads, page, head_dim]``, contiguous, pinned if ``dst`` is on a GPU."""
    layers, kv_heads, head_dim, dtype = dst.layout
    check("host", host, dtype, (None, 2, layers, kv_heads, None, head_dim), dense=True)
    check_page_size(host.shape[4])
    check_head_dim(head_dim)
    if host.is_cuda:
        raise TypeError(f"host is on {host.device}; expected host memory.")
    if dst.device.type == "cuda" and not host.is_pinned():
        raise ValueError("host is not pinned, so the GPU cannot read it; allocate it with pin_memory=True.")
    if host.data_ptr() % 16:
        raise ValueError("host must be aligned to 16 bytes.")
