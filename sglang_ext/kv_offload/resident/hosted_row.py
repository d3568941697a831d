"""State of one hosted request, and what it counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ragserve_kernels.column_assign import Columns
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.resident.cells import CellTable
from sglang_ext.kv_offload.resident.columns import RECENT, ColumnTable
from sglang_ext.kv_offload.resident.link_meter import LinkMeter


@dataclass(slots=True)
class HostedCounts:
    """Counts of a request, as `DecodeReport` says. One that is taken back is hosted anew, and counts on."""

    hosted_steps: int = 0
    hits: int = 0
    misses: int = 0
    fills: int = 0
    host_reads: int = 0
    loaded_bytes: int = 0
    columns: int = 0
    working_set: float = 0.0
    resumed: int = 0
    segmented_tokens: int = 0


@dataclass(eq=False, slots=True)
class HostedRow:
    """A request whose prompt is copied to host pages, and then leaves the device but for its columns.

    Its life: pages are copied (``copied`` < ``pages``), columns are reserved, the pages of a choice are
    loaded into them, and with the step that reads that choice the request *moves*: its prompt may be evicted,
    and in the request table the columns take the place of its last pages.

    Attributes:
        owner: of its host pages.
        request: its row of the request table; negative before it has one.
        choice: pages of a choice, at most.
        n_columns: columns that it has or will have, at least ``choice``. fixed: their number never changes.
        shared: layers and heads share all of them, for a request that attends by threshold.
        slots: int64 [pages * page_size]: where the prompt's pages lie until it moves.
        host: int32 [pages]: its host pages, on the device.
        numbers: the same, on the host.
        head_bytes: K and V of a page of one layer and head.
        context: its prompt's pages, if their KV is in documents' host pages; None if in its own.
        pages: prompt pages that are hosted; those behind them stay on the device.
        copied: of these pages, how many have been copied, or their copies launched.
        columns: int64 [columns * page_size]: slots of the columns; None until they are reserved.
        column_pages: int32 [columns]: pages of the columns.
        protected: ``req.cache_protected_len`` before columns were reserved.
        loaded: event after which the latest choice's pages are in their columns; None on a CPU.
        has_load: a choice of pages has been loaded that no step has read yet.
        filling: cells that it names may be filled by the step at hand: see `CellLoads`.
        late: that choice, some of whose pages are to be loaded just before it is read; None: none are.
        leaving: columns that it loses once ``leave_after`` more choices have begun to be read.
        moved: its prompt is no longer its own. placed: its row of the request table says so.
        arriving: `Columns.tally` of choices on their way from the device, each with its events.
    """

    req: Any
    owner: int
    request: int
    choice: int
    n_columns: int
    fixed: bool
    shared: bool
    slots: torch.Tensor
    host: torch.Tensor
    numbers: list[int]
    head_bytes: int
    counts: HostedCounts
    link: LinkMeter
    context: ContextPages | None = None
    copied: int = 0
    columns: torch.Tensor | None = None
    column_pages: torch.Tensor | None = None
    table: ColumnTable | CellTable | None = None
    protected: int = 0
    loaded: Any = None
    has_load: bool = False
    filling: bool = False
    late: Columns | None = None
    leaving: int = 0
    leave_after: int = 0
    moved: bool = False
    placed: bool = False
    largest_set: int = 0
    arriving: deque[tuple[Any, Any, torch.Tensor]] = field(default_factory=deque)

    @property
    def pages(self) -> int:
        return len(self.numbers)

    @property
    def settled(self) -> bool:
        """Return True once as many choices have been made as make up a working set."""
        return self.table is not None and self.table.choices > RECENT

    def collect(self) -> None:
        """Count what has arrived from the device: hits, misses and the working set."""
        while self.arriving and (self.arriving[0][1] is None or self.arriving[0][1].query()):
            begun, ended, tally = self.arriving.popleft()
            if self.table is None:
                raise IntegrityError("a choice was assigned to a request without columns")
            hits, misses, late, recent, self.largest_set = self.table.tallied(tally)
            self.counts.hits += hits
            self.counts.misses += misses
            if isinstance(self.table, CellTable):
                self.counts.fills += self.table.filled(tally)
            self.counts.loaded_bytes += misses * self.head_bytes
            if self.moved:
                self.counts.working_set = recent / self.table.lists
            seconds = None if ended is None else begun.elapsed_time(ended) / 1e3
            self.link.loaded(misses * self.head_bytes, late * self.head_bytes, seconds)
