"""Loads pages into columns from where their KV is on the host: pages of the request's own, or documents'."""

from __future__ import annotations

import torch

from ragserve_kernels.cell_assign import CellMoves
from ragserve_kernels.cell_gather import cell_gather
from ragserve_kernels.column_gather import column_gather
from ragserve_kernels.context_gather import context_cell_gather
from ragserve_kernels.kv import KVLayers
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.resident.hosted_row import HostedRow


class PageLoads:
    """Launches on the current stream; nothing waits for the device."""

    def __init__(self, host: torch.Tensor, kv: KVLayers, contexts: ContextTable | None) -> None:
        """``host``: `HostPages.pool`. ``kv``: SGLang's pool."""
        self._host = host
        self._kv = kv
        self._contexts = contexts

    def pages(self, row: HostedRow) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return what `to_columns` knows a request's pages by, int32, and all tensors that it reads."""
        if row.context is None:
            return row.host, (row.host,)
        return row.context.tensors[2], row.context.tensors

    def to_columns(self, row: HostedRow, source: torch.Tensor, target: torch.Tensor) -> None:
        """Load pages of each layer and head into columns of it."""
        if row.context is None:
            column_gather(self._host, self._kv, source, target)
        else:
            row.context.gather(self._kv, source, target)

    def to_cells(self, row: HostedRow, moves: CellMoves) -> None:
        """Load pages into cells of any layer and head."""
        entries, cells, count, _ = moves
        if row.context is None:
            cell_gather(self._host, self._kv, entries, cells, count)
        elif self._contexts is None:
            raise IntegrityError("a context in documents' pages is to be loaded, and its pages have no table")
        else:
            context_cell_gather(self._contexts.contexts, self._kv, entries, cells, count)
