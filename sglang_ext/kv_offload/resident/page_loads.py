"""Loads pages into resident blocks from where their KV is on the host: pages of the request's own, or
documents'.
"""

from __future__ import annotations

import torch

from ragserve_kernels.context_gather import context_shared_gather
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.resident_gather import resident_gather
from ragserve_kernels.shared_assign import SharedMoves
from ragserve_kernels.shared_gather import shared_gather
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow


class PageLoads:
    """Launches on the current stream; nothing waits for the device."""

    def __init__(self, host: torch.Tensor, kv: KVLayers, contexts: ContextTable | None) -> None:
        """``host``: `HostPages.pool`. ``kv``: SGLang's pool."""
        self._host = host
        self._kv = kv
        self._contexts = contexts

    def pages(self, row: OffloadedRow) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return what `to_resident_blocks` knows a request's pages by, int32, and all tensors that it
        reads.
        """
        if row.context is None:
            return row.host, (row.host,)
        return row.context.tensors[2], row.context.tensors

    def to_resident_blocks(self, row: OffloadedRow, source: torch.Tensor, target: torch.Tensor) -> None:
        """Load pages of each layer and head into resident blocks of it."""
        if row.context is None:
            resident_gather(self._host, self._kv, source, target)
        else:
            row.context.gather(self._kv, source, target)

    def to_shared_blocks(self, row: OffloadedRow, moves: SharedMoves) -> None:
        """Load pages into shared blocks of any layer and head."""
        entries, shared_blocks, count, _ = moves
        if row.context is None:
            shared_gather(self._host, self._kv, entries, shared_blocks, count)
        elif self._contexts is None:
            raise IntegrityError("a context in documents' pages is to be loaded, and its pages have no table")
        else:
            context_shared_gather(self._contexts.contexts, self._kv, entries, shared_blocks, count)
