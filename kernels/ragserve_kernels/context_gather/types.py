"""Host pages of 8-bit codes, and contexts in documents' host pages, as `context_gather` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragserve_kernels.dispatch import check
from ragserve_kernels.kv import check_page_size

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


@dataclass(frozen=True, eq=False, slots=True)
class HostContexts:
    """Pages of composed contexts in their documents' host pages, by numbers that all requests share.

    A CUDA graph reads ``base``, ``tokens`` and ``turns`` as they are when it runs; of ``host`` it keeps the
    shape only, so it may be captured before there are documents.

    Attributes:
        host: the documents' pages, as `context_gather` takes them; without pages until there are some.
        base: int64 ``[1]`` on the device: the address of these pages.
        tokens: int32 ``[numbers, page, 2]`` on the device: of each token of a page its row in ``host`` and
            the row of ``turns`` that turns its key, as in `context_gather`. The first row is negative where
            the number's page is no context's.
        turns: float32 ``[n, 2 (cos, sin), rotary_dim / 2]`` on the device.
    """

    host: torch.Tensor | HostCodes
    base: torch.Tensor
    tokens: torch.Tensor
    turns: torch.Tensor

    @property
    def pool(self) -> torch.Tensor:
        """The memory of ``host``."""
        return self.host.pool if isinstance(self.host, HostCodes) else self.host

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Layers, KV heads, tokens of a host page, and head size."""
        if isinstance(self.host, HostCodes):
            return self.host.layers, self.host.kv_heads, self.host.block, self.host.head_dim
        return tuple(self.host.shape[2:])  # type: ignore[return-value]

    def check(self, like: torch.Tensor) -> None:
        """Raise ValueError or TypeError unless these are contexts of values as ``like``, [..., kv_heads,
        head_dim], on its device."""
        check_host(self.host, like)
        check("contexts.base", self.base, torch.int64, (1,), like=like)
        check("contexts.tokens", self.tokens, torch.int32, (None, None, 2), like=like, dense=True)
        check_page_size(self.tokens.shape[1])
        check_turns(self.turns, like)


def check_host(host: torch.Tensor | HostCodes, like: torch.Tensor) -> None:
    """Raise ValueError or TypeError unless these are host pages of values as ``like``, [..., kv_heads,
    head_dim], that its device can read."""
    kv_heads, head_dim = like.shape[-2:]
    if isinstance(host, HostCodes):
        host.check()
        pool, block = host.pool, host.block
        if (host.kv_heads, host.head_dim) != (kv_heads, head_dim):
            raise ValueError(
                f"host has {host.kv_heads} heads of {host.head_dim}; expected {kv_heads} of {head_dim}."
            )
    else:
        check("host", host, like.dtype, (None, 2, None, kv_heads, None, head_dim), dense=True)
        pool, block = host, host.shape[4]
    check_page_size(block)
    if pool.is_cuda:
        raise TypeError(f"host is on {pool.device}; expected host memory.")
    if like.is_cuda and len(pool) and not pool.is_pinned():
        raise ValueError("host is not pinned, so the GPU cannot read it; allocate it with pin_memory=True.")
    if pool.data_ptr() % 16:
        raise ValueError("host must be aligned to 16 bytes.")


def check_turns(turns: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ValueError or TypeError unless these are angles for keys as ``like``, [..., head_dim]."""
    check("turns", turns, torch.float32, (None, 2, None), like=like, dense=True)
    head_dim = like.shape[-1]
    if not 1 <= turns.shape[2] <= head_dim // 2:
        raise ValueError(
            f"turns has {turns.shape[2]} angles; expected 1 to {head_dim // 2} for head size {head_dim}."
        )
