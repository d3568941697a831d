"""The truth of ``gather_h2d`` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_h2d_naive(
    host: Sequence[torch.Tensor], out: Sequence[torch.Tensor], index: torch.Tensor, out_index: torch.Tensor
) -> None:
    """See :func:`ragserve_kernels.gather_h2d.gather_h2d`."""
    used = index >= 0
    source, target = index[used].long().cpu(), out_index[used].long()
    for arena, blocks in zip(host, out, strict=True):
        blocks[target] = arena[source].to(blocks.device)
