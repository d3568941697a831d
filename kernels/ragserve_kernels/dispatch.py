"""Shared by all operations: the choice between the plain and the Triton forward, and argument checks.

Checks raise ``ValueError`` (shape, size, value) or ``TypeError`` (dtype, device). The message names the
argument and what is expected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = [
    "FLOAT_DTYPES",
    "INT_DTYPES",
    "check",
    "forced_naive",
    "host_tile_bytes",
    "interpreting",
    "next_power_of_2",
    "use_naive",
    "use_triton",
]

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT_DTYPES = (torch.int32, torch.int64)

_forced: ContextVar[bool] = ContextVar("ragserve_kernels_forced_naive", default=False)


def use_naive() -> bool:
    """Return True if the plain forwards are forced: by ``RAGSERVE_KERNELS=naive`` or :func:`forced_naive`."""
    return _forced.get() or os.environ.get("RAGSERVE_KERNELS", "").lower() == "naive"


@contextmanager
def forced_naive(on: bool = True) -> Iterator[None]:
    """Force the plain forwards inside the block (``on=False`` lifts it), to bisect a wrong result."""
    token = _forced.set(on)
    try:
        yield
    finally:
        _forced.reset(token)


def interpreting() -> bool:
    """Return True if Triton kernels run in its CPU interpreter.

    ``TRITON_INTERPRET`` takes effect only if it is set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def use_triton(tensor: torch.Tensor) -> bool:
    """Return True if an operation on ``tensor`` runs its Triton forward.

    It does on CUDA and in the interpreter, unless the plain forward is forced."""
    return not use_naive() and (tensor.is_cuda or interpreting())


def check(
    name: str,
    tensor: torch.Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    *,
    like: torch.Tensor | None = None,
    dense: bool = False,
) -> None:
    """Check a tensor that a kernel will read or write.

    Args:
        dtypes: the dtypes that it may have.
        shape: its sizes; None stands for any.
        like: a tensor on the device on which it must be.
        dense: it must be contiguous; else only its last dimension must be.

    Raises:
        ValueError, TypeError: named after the argument that does not fit.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {', '.join(map(str, allowed))}.")
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}].")
    if like is not None and tensor.device != like.device:
        raise TypeError(f"{name} is on {tensor.device}; expected {like.device}.")
    if dense and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous.")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"The last dimension of {name} must be contiguous; its stride is {tensor.stride(-1)}."
        )


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def host_tile_bytes(programs: int) -> int:
    """Return the bytes that each of ``programs`` programs keeps in flight from host memory.

    256 KB together cover the link's latency. Few programs with large tiles disturb concurrent work least: a
    matrix product that wants every SM waits for any program, however small (measured in
    ``rotate_gather/README.md``)."""
    return max(8 << 10, min(64 << 10, next_power_of_2((256 << 10) // programs)))
