"""State of one offloaded request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ragserve_kernels.resident_assign import ResidentBlocks
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.resident.link_meter import LinkMeter
from sglang_ext.kv_offload.resident.resident_blocks import RECENT, ResidentTable
from sglang_ext.kv_offload.resident.shared_blocks import SharedTable
from sglang_ext.wire.protocol import OffloadCounts


@dataclass(eq=False, slots=True)
class HeldBlocks:
    """The resident blocks of a request. Written by `ResidentSlots`.

    Attributes:
        count: resident blocks that it has or will have, at least the pages of a selection.
        slots: int64 [blocks * page_size]: slots of the resident blocks; None until they are reserved.
        pages: int32 [blocks]: pages of the resident blocks.
        table: which page each of them holds.
        protected: ``req.cache_protected_len`` before resident blocks were reserved.
        leaving: resident blocks that it loses once ``leave_after`` more selections have begun to be read.
        placed: its row of the request table names them.
    """

    count: int
    slots: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    table: ResidentTable | SharedTable | None = None
    protected: int = 0
    leaving: int = 0
    leave_after: int = 0
    placed: bool = False

    def begin_selection(self) -> None:
        """One more selection begins to be read."""
        self.leave_after -= 1


@dataclass(eq=False, slots=True)
class SelectionLoads:
    """Loads of a request's selections into its resident blocks. Changed by its methods only.

    Attributes:
        loaded: event after which the latest selection's pages are in their resident blocks; None on a CPU.
        pending: a selection of pages has been loaded that no step has read yet.
        filling: shared blocks that it names may be filled by the step at hand: see `SharedLoads`.
        late: that selection, some of whose pages are to be loaded just before it is read; None: none are.
        arriving: `ResidentBlocks.tally` of selections on their way from the device, each with its events.
        largest_set: pages of the largest working set of a layer and head.
    """

    loaded: Any = None
    pending: bool = False
    filling: bool = False
    late: ResidentBlocks | None = None
    largest_set: int = 0
    arriving: deque[tuple[Any, Any, torch.Tensor]] = field(default_factory=deque)

    def launch(self, begun: Any, ended: Any, tally: torch.Tensor) -> None:
        """A load has been launched between these events, None on a CPU. ``tally``: what it counts."""
        self.loaded = ended
        self.arriving.append((begun, ended, tally))

    def select(self, *, late: ResidentBlocks | None = None, filling: bool = False) -> None:
        """A selection waits to be read."""
        self.pending, self.late, self.filling = True, late, filling

    def read(self) -> None:
        """A step reads the selection that waited."""
        self.pending = False

    def fill(self) -> None:
        """Attention fills shared blocks no longer."""
        self.filling = False

    def load_late(self) -> None:
        """What was late has been loaded."""
        self.late = None


@dataclass(eq=False, slots=True)
class OffloadedRow:
    """A request whose prompt is copied to host pages, and then leaves the device but for its resident blocks.
    Written by `OffloadedRows`, its parts by others.

    Its life: pages are copied (``copied`` < ``pages``), resident blocks are reserved, the pages of a
    selection are loaded into them, and with the step that reads that selection the request *moves*: its
    prompt may be evicted, and in the request table the resident blocks take the place of its last pages.

    Attributes:
        owner: of its host pages.
        request: its row of the request table; negative before it has one.
        selection: pages of a selection, at most.
        fixed: the number of its resident blocks never changes.
        shared: layers and heads share all of them, for a request that attends by threshold.
        slots: int64 [pages * page_size]: where the prompt's pages lie until it moves.
        host: int32 [pages]: its host pages, on the device.
        numbers: the same, on the host.
        head_bytes: K and V of a page of one layer and head.
        context: its prompt's pages, if their KV is in documents' host pages; None if in its own.
        pages: prompt pages that are offloaded; those behind them stay on the device.
        copied: of these pages, how many have been copied, or their copies launched.
        moved: its prompt is no longer its own.
    """

    req: Any
    owner: int
    request: int
    selection: int
    blocks: HeldBlocks
    fixed: bool
    shared: bool
    slots: torch.Tensor
    host: torch.Tensor
    numbers: list[int]
    head_bytes: int
    counts: OffloadCounts
    link: LinkMeter
    context: ContextPages | None = None
    copied: int = 0
    moved: bool = False
    loads: SelectionLoads = field(default_factory=SelectionLoads)

    @property
    def pages(self) -> int:
        return len(self.numbers)

    @property
    def settled(self) -> bool:
        """Return True once as many selections have been made as make up a working set."""
        return self.blocks.table is not None and self.blocks.table.selections > RECENT

    def enter(self, request: int) -> None:
        """It has a row of the request table."""
        self.request = request

    def collect(self) -> None:
        """Count what has arrived from the device: hits, misses and the working set."""
        loads, table = self.loads, self.blocks.table
        while loads.arriving and (loads.arriving[0][1] is None or loads.arriving[0][1].query()):
            begun, ended, tally = loads.arriving.popleft()
            if table is None:
                raise IntegrityError("a selection was assigned to a request without resident_blocks")
            hits, misses, late, recent, loads.largest_set = table.tallied(tally)
            self.counts.hits += hits
            self.counts.misses += misses
            if isinstance(table, SharedTable):
                self.counts.fills += table.filled(tally)
            self.counts.loaded_bytes += misses * self.head_bytes
            if self.moved:
                self.counts.working_set = recent / table.lists
            seconds = None if ended is None else begun.elapsed_time(ended) / 1e3
            self.link.loaded(misses * self.head_bytes, late * self.head_bytes, seconds)
