"""Lines that sparse prefills have chosen, kept with their prompts in the prefix cache for later turns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

KEPT_BYTES = 64 * 2**20
"""Device memory of a rank for kept lines. An 8B model's take 0.5 MB at 128k tokens."""


class KeptLines:
    """Lines by the node of SGLang's radix tree that their prompt ends in; of a rank's own query heads.

    A node that goes takes its lines with it, and the lines not used for longest go when those of a new prompt
    find no room. Both depend on what the scheduler does alone, and all ranks' lines have the same size: the
    ranks keep the same ones. Scheduler thread only."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        """``limit``: bytes."""
        self._limit = limit
        self._lines: OrderedDict[int, torch.Tensor] = OrderedDict()  # by the node's id, oldest first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._lines)

    def keep(self, node: Any, lines: torch.Tensor) -> None:
        """Keep the lines of a prompt that ends in this node, in place of earlier ones: uint8
        ``[layers, 2, heads, bytes]``, see `ragserve_kernels.prefill_lists.Lines.packed`."""
        self.forget(node)
        if node.parent is None or lines.nbytes > self._limit:  # the root: no page of the prompt is cached
            return
        self._lines[node.id] = lines
        self.bytes += lines.nbytes
        while self.bytes > self._limit:
            self.bytes -= self._lines.popitem(last=False)[1].nbytes

    def of(self, node: Any) -> torch.Tensor | None:
        """Return the lines of the longest prompt that ends in this node or before it; None without any."""
        while self._lines and node is not None:
            if (lines := self._lines.get(node.id)) is not None:
                self._lines.move_to_end(node.id)
                return lines
            node = node.parent
        return None

    def forget(self, node: Any) -> None:
        """Drop the lines of a node that leaves the tree."""
        if (lines := self._lines.pop(node.id, None)) is not None:
            self.bytes -= lines.nbytes
