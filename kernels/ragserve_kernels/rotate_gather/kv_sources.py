"""Sources of documents' KV: slots of a device pool, or host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, INT_DTYPES, check
from ragserve_kernels.kv import KVLayers


@dataclass(frozen=True, eq=False)
class DeviceSource:
    """Documents in a device pool of any page size: token t of document d is in slots[start[d] + t]."""

    kv: KVLayers
    slots: torch.Tensor  # int32 or int64 [all documents' tokens]
    start: torch.Tensor  # int64 [documents]

    def __post_init__(self) -> None:
        check("DeviceSource.slots", self.slots, INT_DTYPES, (None,), like=self.kv.k[0])
        check("DeviceSource.start", self.start, torch.int64, (None,), like=self.kv.k[0])

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The kernel's source arguments: K, V, and two tables."""
        return self.kv.k_ptrs, self.kv.v_ptrs, self.slots, self.start

    @property
    def documents(self) -> int:
        return self.start.shape[0]

    @property
    def layout(self) -> tuple[int, int, int, torch.dtype]:
        """Layers, KV heads, head size and dtype."""
        return self.kv.layout

    def read(
        self, layer: int, document: torch.Tensor, token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[n, kv_heads, head_dim]`` of tokens given by document and position."""
        slot = self.slots[self.start[document] + token].long()
        return self.kv.k[layer][slot], self.kv.v[layer][slot]


@dataclass(frozen=True, eq=False)
class HostSource:
    """Documents in host memory, each ``[layer, kv_head, tokens, head_dim]`` (that is ``[layer, kv_head,
    block, block_tokens, head_dim]``).

    One arena for K and one for V, pinned if a GPU is to read them (or copied as they are to the device of the
    destination), the same offsets in both: token ``t`` of head ``h`` of layer ``l`` of document ``d`` begins
    at element ``base[d] + ((l * kv_heads + h) * capacity[d] + t) * head_dim``."""

    k: torch.Tensor  # [elements]
    v: torch.Tensor
    base: torch.Tensor  # int64 [documents], elements, a multiple of 16; on the device of the destination
    capacity: torch.Tensor  # int64 [documents]: tokens stored per layer and head, whole blocks
    layers: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, arena in (("k", self.k), ("v", self.v)):
            check(f"HostSource.{name}", arena, FLOAT_DTYPES, (None,))
            if arena.is_cuda and arena.device != self.base.device:
                raise TypeError(
                    f"HostSource.{name} is on {arena.device}; expected host memory, or that of the "
                    "destination."
                )
            if arena.data_ptr() % 16:
                raise ValueError(f"HostSource.{name} must be aligned to 16 bytes.")
            if self.base.is_cuda and not arena.is_cuda and not arena.is_pinned():
                raise ValueError(
                    f"HostSource.{name} is not pinned, so the GPU cannot read it; allocate it with "
                    "pin_memory=True."
                )
        if self.k.dtype != self.v.dtype:
            raise TypeError(f"HostSource.v has dtype {self.v.dtype}; expected K's, {self.k.dtype}.")
        check("HostSource.base", self.base, torch.int64, (None,))
        check("HostSource.capacity", self.capacity, torch.int64, self.base.shape, like=self.base)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The kernel's source arguments: K, V, and two tables."""
        return self.k, self.v, self.capacity, self.base

    @property
    def documents(self) -> int:
        return self.base.shape[0]

    @property
    def layout(self) -> tuple[int, int, int, torch.dtype]:
        """Layers, KV heads, head size and dtype."""
        return self.layers, self.kv_heads, self.head_dim, self.k.dtype

    def read(
        self, layer: int, document: torch.Tensor, token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[n, kv_heads, head_dim]`` of tokens given by document and position."""
        document, token = document.cpu(), token.cpu()
        base, capacity = self.base.cpu()[document], self.capacity.cpu()[document]
        head = layer * self.kv_heads + torch.arange(self.kv_heads)
        row = head[None, :] * capacity[:, None] + token[:, None]
        element = base[:, None, None] + row[:, :, None] * self.head_dim + torch.arange(self.head_dim)
        return self.k[element], self.v[element]
