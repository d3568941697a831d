"""Helpers of the kernel tests: poison, tolerance, and attention in float64."""

from __future__ import annotations

import math

import torch

TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``||got - want|| / ||want||`` in float64; NaN or infinity anywhere in ``got`` gives infinity, also
    where ``want`` is all zero.
    """
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(want.shape)}")
    if not torch.isfinite(got).all():
        return math.inf
    difference = torch.linalg.vector_norm(got - want).item()
    scale = torch.linalg.vector_norm(want).item()
    return difference / scale if scale else (0.0 if difference == 0.0 else math.inf)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Within the tolerance of ``dtype``: 2e-3 for float32, 1e-2 for float16 and bfloat16."""
    error = relative_error(got, want)
    assert error < TOLERANCE[dtype], f"{what} relative error {error:.3g} >= {TOLERANCE[dtype]:g}"


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor full of NaN: whatever the kernel leaves unwritten, or reads without having written, shows."""
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 on the CPU.

    ``q`` [rows, query_heads, head_dim], ``k`` and ``v`` [keys, kv_heads, head_dim], ``mask`` bool [rows,
    keys] (True = attend). Returns the output [rows, query_heads, head_dim], zero where a row attends to
    nothing, and the weights [query_heads, rows, keys]."""
    q, k, v = (t.detach().double().cpu() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask.cpu(), -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), weights
