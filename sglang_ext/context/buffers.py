"""Index tensors on the device: pinned, reused, copied in one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


# SGLang's pools give this slot to nobody: padded tokens are written there, and rows that a layer does not
# keep
PADDING_SLOT = 0


@dataclass(frozen=True, eq=False, slots=True)
class Buffers:
    """K and V of every layer, [rows, kv_heads, head_dim] each, as SGLang's pool has them."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v[layer]


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """To the device without waiting for it: through pinned memory, which torch keeps until the copy has run."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
