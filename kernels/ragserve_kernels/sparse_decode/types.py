"""Pages and ranges that the KV heads of a decode step attend to."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["FULL", "SELECTED", "STREAMING", "HeadKinds"]

FULL, SELECTED, STREAMING = 0, 1, 2


class HeadKinds(NamedTuple):
    """The kind of each KV head, and the window of the streaming ones."""

    kinds: torch.Tensor
    """int32 [kv_heads], or [batch, kv_heads] where requests differ: FULL, SELECTED or STREAMING."""
    sink_tokens: int = 0
    """A streaming head attends to the blocks that hold its first ``sink_tokens`` tokens ..."""
    local_tokens: int = 0
    """... and its last ``local_tokens`` tokens."""
