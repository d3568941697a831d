"""K and V buffers of all layers, the padding slot, and uploads that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

# SGLang's pools never give this slot away: padding and rows that a layer does not keep are written there
PADDING_SLOT = 0


@dataclass(frozen=True, eq=False, slots=True)
class Buffers:
    """K and V of every layer, [rows, kv_heads, head_dim] each, with the interface of SGLang's pool."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v[layer]


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting, through pinned memory, which torch keeps until the copy has run."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def upload_all(values: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Copy several arrays to the device like `upload`, by one copy: int64, of the same shapes. Each begins at
    a multiple of 16 bytes, as a tensor of its own does: other addresses would take kernels of their own.
    """
    starts = [0, *accumulate(each.size + each.size % 2 for each in values)]
    joined = np.zeros(starts[-1], dtype=np.int64)
    for at, each in zip(starts, values, strict=False):
        joined[at : at + each.size] = each.ravel()
    whole = upload(joined, device)
    return [whole[at : at + each.size].view(each.shape) for at, each in zip(starts, values, strict=False)]
