"""The reference of ``gather_pages``: two operations for each of K and V of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_pages_naive(
    k: Sequence[torch.Tensor], v: Sequence[torch.Tensor], slots: torch.Tensor, *, page_size: int
) -> torch.Tensor:
    """``k``, ``v``: per layer [slots, kv_heads, head_dim], of any strides; else as `gather_pages`."""
    count, (heads, dim) = len(slots) // page_size, k[0].shape[1:]
    shape = (count, 2, len(k), heads, page_size, dim)
    pages = torch.empty(shape, dtype=k[0].dtype, device=slots.device)
    absent, found = slots < 0, slots.clamp(min=0)
    for half, layers in enumerate((k, v)):
        for layer, buffer in enumerate(layers):
            pages[:, half, layer] = buffer[found].unflatten(0, (count, page_size)).transpose(1, 2)
    if absent.is_cuda or absent.any():  # a device is not waited for
        pages.masked_fill_(absent.view(count, 1, 1, 1, page_size, 1), 0)
    return pages
