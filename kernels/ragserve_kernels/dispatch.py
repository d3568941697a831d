"""What every operation shares: the switch between the plain and the Triton forward, argument checks,
per-layer KV tables.

Errors are ``ValueError`` (a shape, a size, a value) and ``TypeError`` (a dtype or device); each names the
argument and what is expected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT_DTYPES = (torch.int32, torch.int64)
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128)

_forced: ContextVar[bool] = ContextVar("ragserve_kernels_forced_naive", default=False)


def use_naive() -> bool:
    """Whether the plain-torch forwards are forced: by ``RAGSERVE_KERNELS=naive`` or inside
    :func:`forced_naive`.
    """
    return _forced.get() or os.environ.get("RAGSERVE_KERNELS", "").lower() == "naive"


@contextmanager
def forced_naive(on: bool = True) -> Iterator[None]:
    """Force (or, with ``on=False``, no longer force) the plain-torch forwards inside the block, to bisect a
    wrong result.
    """
    token = _forced.set(on)
    try:
        yield
    finally:
        _forced.reset(token)


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU. ``TRITON_INTERPRET`` counts only if set
    before triton was imported.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` runs its Triton forward: on CUDA or in the interpreter, unless the
    plain one is forced.
    """
    return not use_naive() and (tensor.is_cuda or interpreting())


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype] = FLOAT_DTYPES) -> None:
    if tensor.dtype not in allowed:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; expected one of {', '.join(str(d) for d in allowed)}."
        )


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """``None`` in ``shape`` stands for any size."""
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}].")


def check_head_dim(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"Head size {head_dim} is not supported; expected one of {HEAD_DIMS}.")


def check_page_size(page_size: int) -> None:
    if page_size not in PAGE_SIZES:
        raise ValueError(f"Page size {page_size} is not supported; expected one of {PAGE_SIZES}.")


def check_same_device(first: torch.Tensor, **others: torch.Tensor) -> None:
    for name, other in others.items():
        if other.device != first.device:
            raise TypeError(f"{name} is on {other.device}; expected {first.device}.")


def check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"The last dimension of {name} must be contiguous; its stride is {tensor.stride(-1)}."
        )


def query_group(query_heads: int, kv_heads: int) -> int:
    """Query heads per KV head."""
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads.")
    return query_heads // kv_heads


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def host_tile_bytes(programs: int) -> int:
    """Bytes that one of ``programs`` programs should have in flight from host memory: 256 KB together cover
    the link's latency.

    Few programs with large tiles are kind to what runs beside them: a matrix product that wants every SM to
    itself waits for any program, however small (measured in ``rotate_gather/README.md``)."""
    return max(8 << 10, min(64 << 10, next_power_of_2((256 << 10) // programs)))


@dataclass(frozen=True, eq=False)
class KVLayers:
    """The K and V of all layers, each ``[slots, kv_heads, head_dim]``, with their addresses in tables that a
    kernel can read.

    That is the layout of SGLang's ``MHATokenToKVPool`` (``KVLayers(pool.k_buffer, pool.v_buffer)``). Build it
    once: the tables are copied to the device, which a CUDA graph cannot capture. The tensors are kept alive
    as long as this object."""

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
        check_dtype("k[0]", first)
        check_shape("k[0]", first, (None, None, None))
        for name, tensors in (("k", self.k), ("v", self.v)):
            for i, tensor in enumerate(tensors):
                if (
                    tensor.shape != first.shape
                    or tensor.dtype != first.dtype
                    or tensor.device != first.device
                ):
                    raise ValueError(f"{name}[{i}] differs from k[0] in shape, dtype or device.")
                if not tensor.is_contiguous():
                    raise ValueError(f"{name}[{i}] is not contiguous.")
                if tensor.data_ptr() % 16:
                    raise ValueError(
                        f"{name}[{i}] is not aligned to 16 bytes; kernels load 16 bytes at a time."
                    )
        for attribute, tensors in (("k_ptrs", self.k), ("v_ptrs", self.v)):
            addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
            object.__setattr__(self, attribute, addresses.to(first.device))

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
