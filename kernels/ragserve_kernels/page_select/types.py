"""Key summaries that score blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["KeySummary"]


class KeySummary(NamedTuple):
    """Summaries of a pool's keys, a row per logical page; those of block p begin at p * per_block.

    Each tensor is ``[rows, kv_heads, head_dim]`` in q's dtype, or ``[layers, rows, ...]``."""

    high: torch.Tensor
    """Largest keys; without ``low`` centres: the mean of the keys, or the centre of their box. Or the pool's
    keys themselves, with a page's tokens per block: a block then scores its largest q . k."""
    low: torch.Tensor | None = None
    """Smallest keys, of the same shape and strides as ``high``."""
    per_block: int = 1
    """Logical pages per block: a power of two up to 128."""
