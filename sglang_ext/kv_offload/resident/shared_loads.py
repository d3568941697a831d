"""Brings the pages of a progressive request's rankings into its shared blocks.

The first step behind a ranking reads most of these pages from the host anyway, as the ranking is not theirs
yet: attention writes what it reads to the shared blocks that are to have it. What it has not reached is
loaded beside the steps that follow."""

from __future__ import annotations

from ragserve_kernels.paged import PageSelection
from ragserve_kernels.shared_assign import SharedMoves
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.kv_offload.resident.page_loads import PageLoads
from sglang_ext.kv_offload.resident.shared_blocks import SharedTable

FILLING_LAG = 2
"""Steps between a selection and its use from which on attention fills shared_blocks: one that does so, and
one beside which the rest is loaded."""


class SharedLoads:
    """Scheduler thread only, on the stream of the forward passes, and beside it. Nothing waits for the
    device."""

    def __init__(self, loads: PageLoads, copies: CopyStream) -> None:
        self._loads = loads
        self._copies = copies

    def begin(self, row: OffloadedRow, table: SharedTable, selection: PageSelection, *, lag: int) -> None:
        """Give the pages of a selection shared blocks, and load them or let the next step do so.

        ``lag``: steps between the one that chose and the first that follows `OffloadedRows.arrive`. A request
        whose prompt is still on the device reads nothing from the host, so its pages are loaded."""
        if row.blocks.pages is None:
            raise IntegrityError("a request without resident blocks has pages to load into them")
        self._copies.await_on_current(None, row.host, row.blocks.pages, *table.tensors)
        moves = table.assign(selection, row.host, row.blocks.pages)
        row.loads.select(filling=row.moved and lag >= FILLING_LAG)
        if row.loads.filling:
            table.expect()
        else:
            self._load(row, moves)

    def rest(self, row: OffloadedRow) -> None:
        """Load what the step behind a selection has not written to its shared blocks."""
        if not row.loads.filling or not isinstance(row.blocks.table, SharedTable):
            return
        row.loads.fill()
        moves = row.blocks.table.rest()
        if moves is not None:
            self._load(row, moves)

    def _load(self, row: OffloadedRow, moves: SharedMoves) -> None:
        """Load pages into shared blocks. Steps that have been launched read what was there; later ones do not
        look there before `OffloadedRows.arrive`."""
        tally = moves.tally
        with self._copies.behind(*moves):
            begun = self._copies.event()
            self._loads.to_shared_blocks(row, moves)
            if tally.is_cuda:
                tally = tally.to("cpu", non_blocking=True)
            row.loads.launch(begun, self._copies.event(), tally)
