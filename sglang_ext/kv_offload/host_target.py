"""Where a composed context's KV goes that is offloaded from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow

PIECE_BYTES = 128 * 2**20  # of KV on the device at a time, on its way to the host


@dataclass(frozen=True, eq=False, slots=True)
class HostTarget:
    """Host pages of an admitted request, filled in pieces of whole pages.

    Attributes:
        page_size: tokens per page.
        piece: tokens of a piece, at most.
    """

    prefixes: HostPrefixes
    row: OffloadedRow
    page_size: int
    piece: int

    @property
    def tokens(self) -> int:
        """Tokens that go to the host; those behind them have slots."""
        return self.row.pages * self.page_size

    @property
    def is_there(self) -> bool:
        """True if the documents' pages hold these tokens, and nothing is to be written."""
        return self.row.context is not None

    def write(self, first: int, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Take the KV from token ``first`` on: see `HostPrefixes.write`."""
        self.prefixes.write(self.row, first // self.page_size, k, v)
