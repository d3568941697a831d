"""Sources of documents' KV: slots of a device pool, or host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, INT_DTYPES, check
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.quantize_kv.naive import dequantize


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
    def pairs(self) -> None:
        """A pool's rows are plain."""
        return None

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
    at element ``base[d] + row * head_dim``, where ``row`` is ``(l * kv_heads + h) * capacity[d] + t``.

    With ``pairs`` the arenas hold 8-bit codes (`ragserve_kernels.quantize_kv`), and word
    ``base[d] / 4 + row`` of each of the two is that row's scale (low half) and zero point (high half)."""

    k: torch.Tensor  # [elements]
    v: torch.Tensor
    base: torch.Tensor  # int64 [documents], elements, a multiple of 16; on the device of the destination
    capacity: torch.Tensor  # int64 [documents]: tokens stored per layer and head, whole blocks
    layers: int
    kv_heads: int
    head_dim: int
    pairs: tuple[torch.Tensor, torch.Tensor] | None = None  # int32 [words] for K and for V, in host memory

    def __post_init__(self) -> None:
        for name, arena in (("k", self.k), ("v", self.v)):
            check(f"HostSource.{name}", arena, FLOAT_DTYPES if self.pairs is None else torch.int8, (None,))
            if arena.data_ptr() % 16:
                raise ValueError(f"HostSource.{name} must be aligned to 16 bytes.")
        if self.pairs is not None:
            for words in self.pairs:
                check("HostSource.pairs", words, torch.int32, (None,))
        for name, arena in (("k", self.k), ("v", self.v), *(("pairs", each) for each in self.pairs or ())):
            if arena.is_cuda and arena.device != self.base.device:
                raise TypeError(
                    f"HostSource.{name} is on {arena.device}; expected host memory, or that of the "
                    "destination."
                )
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
        """K and V ``[n, kv_heads, head_dim]`` of tokens given by document and position; in float32 if
        quantised."""
        document, token = document.cpu(), token.cpu()
        base, capacity = self.base.cpu()[document], self.capacity.cpu()[document]
        head = layer * self.kv_heads + torch.arange(self.kv_heads)
        row = head[None, :] * capacity[:, None] + token[:, None]
        element = base[:, None, None] + row[:, :, None] * self.head_dim + torch.arange(self.head_dim)
        k, v = self.k[element], self.v[element]
        if self.pairs is None:
            return k, v
        words = base[:, None] // 4 + row
        k_pairs, v_pairs = (each[words].view(torch.float16).unflatten(-1, (-1, 2)) for each in self.pairs)
        return dequantize(k, k_pairs), dequantize(v, v_pairs)
