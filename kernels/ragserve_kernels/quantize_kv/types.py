"""Quantised K or V of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (4, 8)


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """K or V of one layer in 8 or 4 bits: value = scale * code + zero, per token and head.

    Inputs beyond float16's range (65504) do not fit.

    Attributes:
        codes: 8 bits: int8 ``[slots, kv_heads, head_dim]``, -128 to 127. 4 bits: uint8 ``[slots, kv_heads,
            head_dim / 2]``, each code + 8; the low nibble of byte j is dimension j, the high nibble j +
            head_dim / 2, so that a kernel needs no interleaving.
        params: float16 ``[slots, kv_heads, 2]``, contiguous: scale and zero point.
        bits: 4 or 8.
    """

    codes: torch.Tensor
    params: torch.Tensor
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"{self.bits} bits are not supported; expected one of {BITS}.")
        wanted = torch.int8 if self.bits == 8 else torch.uint8
        if self.codes.dtype != wanted or self.codes.dim() != 3:
            raise TypeError(
                f"codes is {self.codes.dtype} with {self.codes.dim()} dimensions; expected {wanted} with 3."
            )
        if (
            self.params.dtype != torch.float16
            or self.params.shape != (*self.codes.shape[:2], 2)
            or not self.params.is_contiguous()
        ):
            raise ValueError(f"params must be contiguous float16 {[*self.codes.shape[:2], 2]}.")
        if self.params.device != self.codes.device:
            raise TypeError(f"params is on {self.params.device}; expected {self.codes.device}.")

    @classmethod
    def empty(
        cls, slots: int, kv_heads: int, head_dim: int, *, bits: int, device: torch.device | str
    ) -> QuantizedKV:
        """Return uninitialised room for ``slots`` tokens."""
        dtype = torch.int8 if bits == 8 else torch.uint8
        codes = torch.empty(slots, kv_heads, head_dim * bits // 8, dtype=dtype, device=device)
        return cls(codes, torch.empty(slots, kv_heads, 2, dtype=torch.float16, device=device), bits)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(slots, kv_heads, head_dim)`` of the values."""
        slots, heads, width = self.codes.shape
        return slots, heads, width * (8 // self.bits)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and head."""
        return self.codes.shape[2] + 4
