"""The offloaded requests of one rank: copies to the host, resident blocks, and loads into them.

Ranks decide by lengths, options and counts of free slots and pages, which are the same on all of them:
nothing is voted on. What SGLang allocates and frees changes before it schedules (`before_schedule`), on its
own stream; copies and loads are launched behind forward passes, on a stream beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.resident_assign import ResidentBlocks
from sglang_ext.documents.fill import DocumentKv, fill_pages
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.kv_offload.host.host_pages import HostPages
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.resident.offloaded_row import HeldBlocks, OffloadedRow
from sglang_ext.kv_offload.resident.page_loads import PageLoads
from sglang_ext.kv_offload.resident.resident_blocks import EMPTY, ResidentTable
from sglang_ext.kv_offload.resident.resident_check import differing
from sglang_ext.kv_offload.resident.resident_slots import ResidentSlots
from sglang_ext.kv_offload.resident.shared_blocks import SharedBlocks, SharedTable
from sglang_ext.kv_offload.resident.shared_loads import SharedLoads
from sglang_ext.kv_offload.resident.working_set import OffloadBounds, resized
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.stages import stages
from sglang_ext.tensors.buffers import upload
from sglang_ext.versions import leave_tree, protect, row_of
from sglang_ext.wire.protocol import OffloadCounts

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache

STEP_BYTES = 128 * 2**20  # copied to the host beside one decode step: 3 ms of a link of 50 GB/s


class OffloadedRows:
    """Scheduler thread only. ``attach`` has to be called before the first request."""

    _tree: DocumentRadixCache
    slots: ResidentSlots
    ready = False  # while the prefix cache is not ours: nothing can be offloaded then

    def __init__(
        self,
        pool: Any,
        req_to_token: torch.Tensor,
        page_size: int,
        pages: HostPages,
        statistics: PageStats,
        contexts: ContextTable | None = None,
    ) -> None:
        """``contexts``: where progressive attention finds those in documents; None: it reads copies."""
        self.pages = pages
        self.page_size = page_size
        self.kv = KVLayers(list(pool.k_buffer), list(pool.v_buffer))
        self.table = req_to_token
        self.statistics = statistics
        self.documents: HostDocuments | None = None  # that requests read where they are; None: none do
        self.first_host = self.kv.slots // page_size  # statistics of host page p are those of page first + p
        self.head_bytes = pages.shape.page_bytes // (self.kv.layers * self.kv.kv_heads)
        self.shared_blocks = SharedBlocks(self.kv, page_size, pages.numbers)
        self.contexts = contexts
        self._loads = PageLoads(pages.pool, self.kv, contexts)
        self.copies = CopyStream(self.kv.device)
        self._shared_block_loads = SharedLoads(self._loads, self.copies)
        self._rows: dict[int, OffloadedRow] = {}  # by owner
        self.waiting: dict[int, HostPrefix] = {}  # by owner, of requests that are in no batch
        self._owners = 0
        self.joins: list[Any] = []  # loads and copies of slots that are free again
        self.bounds = OffloadBounds()
        shape = (req_to_token.shape[0], -(-req_to_token.shape[1] // page_size))
        self.statistics_of = torch.full(shape, -1, dtype=torch.int32, device=self.kv.device)
        """By a request's row of the request table, where the statistics of its pages lie; -1: with them."""

    def attach(self, tree: DocumentRadixCache, ranks: Ranks) -> None:
        """``tree``: SGLang's prefix cache, ours. ``ranks``: those that vote."""
        self._tree = tree
        self.slots = ResidentSlots(tree, self.table, self.page_size, self.copies)
        self.bounds.ranks = ranks
        self.ready = True

    def begin(
        self,
        req: Any,
        tokens: int,
        selection: int,
        blocks: int,
        counts: OffloadCounts,
        *,
        shared: bool = False,
    ) -> OffloadedRow | None:
        """Take a request in, and copy the statistics of its pages.

        Args:
            tokens: of the request in the step just launched, which writes the last of them.
            selection: pages of a selection, at most.
            blocks: for each of them; 0: as many as its working set takes.
            counts: its own, to go on with.
            shared: as in `OffloadedRow`.

        Returns:
            None if the bounds do not allow it, or the prompt has no more pages than resident blocks.
        """
        pages, fixed = (tokens - 1) // self.page_size, blocks > 0
        blocks = self.resident_blocks_of(selection, blocks)
        if pages <= blocks or not self.may_begin() or (owned := self.own(pages)) is None:
            return None
        owner, numbers, host = owned
        try:
            slots = self.table[row_of(req), : pages * self.page_size].long()
            self.statistics.copy(slots[:: self.page_size] // self.page_size, self.first_host + host)
        except BaseException:  # nobody knows the row, so nobody would release it
            self.pages.release(owner)
            raise
        row = OffloadedRow(
            *(req, owner, row_of(req), selection, HeldBlocks(blocks), fixed, shared),
            *(slots, host, numbers, self.head_bytes, counts, self.bounds.link),
        )
        self._rows[owner] = row
        return row

    def may_begin(self) -> bool:
        """Return whether the link has room for the loads of one request more."""
        allowed = self.bounds.link_allows(self._rows.values())
        self.bounds.waiting["link"] += not allowed
        return allowed

    def own(
        self, pages: int, context: ContextPages | None = None
    ) -> tuple[int, list[int], torch.Tensor] | None:
        """Return a new owner of host pages, and these, as ints and int32 on the device, or None for want of
        them. ``context``: holds their KV."""
        if context is None:
            numbers = self.pages.allocate(self._owners, pages)
        else:
            numbers = self.pages.name(self._owners, pages, context)
        if numbers is None:
            self.bounds.waiting["host"] += 1
            return None
        owner, self._owners = self._owners, self._owners + 1
        try:
            host = upload(np.array(numbers, dtype=np.int32), self.kv.device)
        except BaseException:  # nobody knows the owner, so nobody would release it
            self.pages.release(owner)
            raise
        return owner, numbers, host

    def add(self, row: OffloadedRow) -> None:
        """Take in a request that has moved already."""
        self._rows[row.owner] = row

    def remove(self, row: OffloadedRow) -> None:
        """Undo `add`; whoever calls keeps the host pages."""
        del self._rows[row.owner]

    def copy(self) -> None:
        """Launch the next copies to the host, oldest requests first, as many as go beside a step."""
        left = max(1, STEP_BYTES // self.pages.shape.page_bytes)
        for row in self._rows.values():
            count = min(left, row.pages - row.copied)
            if not count:
                continue
            blocks = list(range(row.copied, row.copied + count))
            with self.copies.behind(row.slots):
                kv = DocumentKv(self.kv.k, self.kv.v, row.slots, self.kv)
                numbers = row.numbers[row.copied : row.copied + count]
                fill_pages(self.pages.pool, self.pages.shape, blocks, numbers, kv)
            row.copied += count
            left -= count
            if not left:
                return

    def load(self, row: OffloadedRow, selection: PageSelection, lag: int = 0) -> PageSelection:
        """Load what a selection misses, and return it with resident blocks for offloaded pages.

        ``lag``: as for `SharedLoads.begin`.

        A request without resident blocks keeps its prompt on the device, and its selection as it is."""
        if row.blocks.table is None or row.blocks.pages is None:
            return selection
        selection = PageSelection(selection.blocks.contiguous(), selection.counts.contiguous())
        blocks, counts = selection
        if isinstance(row.blocks.table, SharedTable):
            self._shared_block_loads.begin(row, row.blocks.table, selection, lag=lag)
            return selection
        pages, own = self._loads.pages(row)
        with self.copies.behind(blocks, counts, *own, row.blocks.pages, *row.blocks.table.tensors):
            found = row.blocks.table.assign(selection, pages, row.blocks.pages)
            begun = self.copies.event()
            self._loads.to_resident_blocks(row, found.source, found.target)
            tally = found.tally
            if tally.is_cuda:
                tally = tally.to("cpu", non_blocking=True)
            row.loads.launch(begun, self.copies.event(), tally)
        row.loads.select(late=found if row.blocks.count < 2 * row.selection else None)
        # where `ResidentSlots.place` puts its resident block
        return PageSelection(found.placed, counts)

    def load_rest(self, row: OffloadedRow) -> None:
        """Load what the step just launched has not written to shared blocks itself."""
        self._shared_block_loads.rest(row)

    def _load_late(self, row: OffloadedRow, late: ResidentBlocks, table: ResidentTable) -> None:
        """Load what could not be loaded while the selection before was read, on the current stream."""
        if row.blocks.pages is None:
            raise IntegrityError("a request without resident blocks has pages to load into them")
        pages, own = self._loads.pages(row)
        self.copies.await_on_current(
            row.loads.loaded, late.late_pages, late.late_resident_blocks, *own, row.blocks.pages
        )
        is_none = late.late_pages < 0
        self._loads.to_resident_blocks(
            row,
            pages[late.late_pages.clamp_min(0).long()].masked_fill_(is_none, EMPTY),
            row.blocks.pages[late.late_resident_blocks.clamp_min(0).long()],
        )
        with self.copies.behind(late.late_pages, late.late_resident_blocks):
            table.settle(late)

    def count_reads(self, counts: OffloadCounts, pages: int, head_bytes: int) -> None:
        """Count pages of KV heads, of so many bytes, that a step of a request has read from the host
        itself."""
        counts.host_reads += pages
        counts.loaded_bytes += pages * head_bytes
        self.bounds.link.loaded(pages * head_bytes, 0, None)

    def arrive(self, row: OffloadedRow, selection: PageSelection) -> bool:
        """Let the step that reads a selection follow its loads.

        Return False if it must not read it: the request was to move and could not, and ends with an error."""
        if not row.loads.pending:
            return True  # made when the request had no resident blocks: of its pages on the device
        self.load_rest(row)
        self.copies.await_on_current(row.loads.loaded, selection.blocks)
        row.loads.read()
        if isinstance(row.blocks.table, SharedTable):
            row.blocks.table.arrive()
        row.collect()
        if not row.moved:
            return False
        late, table = row.loads.late, row.blocks.table
        if late is not None and isinstance(table, ResidentTable):
            self._load_late(row, late, table)  # the selection before is not read any more
            row.loads.load_late()
        row.blocks.begin_selection()
        return True

    def settle(self) -> None:
        """Forget resident blocks and contexts that are gone."""
        self.shared_blocks.settle()
        if self.contexts is not None:
            self.contexts.settle()

    def join(self) -> None:
        """Let the forward pass follow loads into freed blocks and copies of freed prompts, and put the blocks
        of moved requests into the request table: it must not name pages that others may get, and a prefill
        may come before their next step."""
        for event in self.joins:
            self.copies.await_on_current(event)
        self.joins.clear()
        self.settle()
        if self.documents is not None:
            self.copies.follow()
        for row in self._rows.values():
            if row.moved and not row.blocks.placed:
                self.slots.place(row)
                self.statistics_of[row.request, : row.pages] = self.first_host + row.host

    # before SGLang schedules

    def before_schedule(self, reads_next: Callable[[OffloadedRow], bool]) -> bool:
        """Reserve resident blocks and move requests. Return whether one has moved, which leaves room for
        others.

        ``reads_next``: whether a row's next step is the first to read the selection that was loaded."""
        moved = False
        if self.documents is not None:
            self.documents.poll()
        for row in self._rows.values():
            if row.moved:
                if row.blocks.leaving:
                    stages.run_alike("offloading", stages.ending([row.req]), self.slots.give_back, row)
            elif row.blocks.slots is None:
                if row.copied == row.pages:
                    stages.run_alike("offloading", stages.ending([row.req]), self._reserve, row)
            elif row.loads.pending and reads_next(row):
                stages.run_alike("offloading", stages.ending([row.req]), self._move, row)
                moved = moved or row.moved
        return moved

    def release(self, row: OffloadedRow) -> None:
        """Free what a request has; its resident blocks, once it has moved, are freed with its other slots."""
        self.leave(row)
        self.pages.release(row.owner)

    def leave(self, row: OffloadedRow) -> None:
        """`release`, but for the host pages."""
        row.collect()
        if row.blocks.slots is not None and not row.moved:
            protect(row.req, row.blocks.protected)
            self._tree.token_to_kv_pool_allocator.free(row.blocks.slots)
        if row.blocks.table is not None and row.blocks.pages is not None:
            row.blocks.table.drop(row.blocks.pages)
        row.loads.fill()
        if row.loads.loaded is not None:
            self.joins.append(row.loads.loaded)
        if row.request >= 0:  # else its first pass has failed on the way
            self.statistics_of[row.request, : row.pages] = -1
        del self._rows[row.owner]

    def _reserve(self, row: OffloadedRow) -> None:
        """Take resident blocks out of the pool, if it has room: else the prompt stays, and asks again."""
        count, pages, selection = row.blocks.count, row.pages, row.selection
        self.slots.reserve(row, lambda: self.new_table(count, pages, selection, shared=row.shared))

    def new_table(
        self, blocks: int, pages: int, selection: int, *, shared: bool
    ) -> ResidentTable | SharedTable:
        """Return a table of so many resident blocks, which hold nothing yet, of a prompt of ``pages``. Other
        arguments as in `OffloadedRow`."""
        if shared:
            return SharedTable(self.shared_blocks, blocks, pages, selection)
        return ResidentTable(self.kv.layers, self.kv.kv_heads, blocks, pages, self.kv.device)

    def _move(self, row: OffloadedRow) -> None:
        """Give the prompt up: its cached part may be evicted, its own part is freed.

        The next forward pass may write to its slots, so it follows the copies that read them: a load comes
        after those.
        """
        if row.blocks.slots is None:
            raise IntegrityError("a request without resident blocks is to move")
        req, held = row.req, self.slots.in_order(row)
        own = row.slots[row.blocks.protected :]
        if len(own):
            self._tree.token_to_kv_pool_allocator.free(own)
        leave_tree(self._tree, req)
        self.slots.note(row, held)
        self.joins.append(row.loads.loaded)
        row.moved = True

    def resize(self, rows: Sequence[OffloadedRow | None], *, others_wait: bool) -> None:
        """Let ranks agree on working sets, and give moved requests the resident blocks that these take.

        ``rows``: those of the running batch, in its order, which is the same on all ranks."""
        sets = self.bounds.exchange(rows)
        for row, pages in zip(rows, sets, strict=True):
            if row is None or not pages or row.fixed or not row.moved:
                continue
            blocks = resized(
                row.blocks.count, pages, row.selection, others_wait=others_wait, settled=row.settled
            )
            stages.run_alike("offloading", stages.ending([row.req]), self.slots.resize, row, blocks)

    def resident_blocks_of(self, selection: int, blocks: int) -> int:
        """Return the resident blocks that a request begins with; arguments as those of `begin`."""
        return blocks * selection or self.bounds.first_resident_blocks(selection)

    def begin_step(self, now: float) -> None:
        """Count a step launched at ``now``, in seconds, and who waits for resident blocks in it."""
        if any(row.moved for row in self._rows.values()):
            self.bounds.link.step(now)
        else:
            self.bounds.link.pause()
        short = sum(row.blocks.slots is None and row.copied == row.pages for row in self._rows.values())
        self.bounds.waiting = Counter(device=short)

    @property
    def due_tokens(self) -> int:
        """Slots to keep free for the next request that waits for resident blocks: the most that one wants.

        It leaves more than those to the one after it, when its prompt goes."""
        pending = (row.blocks.count for row in self._rows.values() if row.blocks.slots is None)
        return self.page_size * max(pending, default=0)

    def check(self) -> None:
        """Raise IntegrityError for a lost page, or a resident block that differs from its host page."""
        self.copies.synchronize()
        self.settle()
        self.pages.check({*self._rows, *self.waiting})
        if self.documents is not None:
            held = [row.context for row in self._rows.values()]
            held += [prefix.context for prefix in self.waiting.values()]
            contexts = [context for context in held if context is not None]
            self.documents.check([key for each in contexts for key in each.keys])
            if self.contexts is not None:
                self.contexts.check(contexts)
        for row in self._rows.values():
            bad = 0 if row.blocks.slots is None else differing(row, self.kv, self.pages.pool, self.contexts)
            if bad:
                raise IntegrityError(f"{bad} resident blocks of request {row.req.rid} differ from host pages")

    def describe(self) -> dict[str, Any]:
        """Return counts of pages and requests, for the control channel."""
        moved = sum(row.moved for row in self._rows.values())
        return {
            "bytes": self.pages.capacity * self.pages.shape.page_bytes,
            "pages": self.pages.capacity,
            "used": self.pages.used,
            "numbers": self.pages.numbers,
            "in_documents": self.pages.elsewhere,
            "documents": 0 if self.documents is None else self.documents.documents,
            "document_pages": 0 if self.documents is None else self.documents.used,
            "document_limit": 0 if self.documents is None else self.documents.most,
            "requests": moved,
            "copying": len(self._rows) - moved,
            "retracted": len(self.waiting),
            "resident_blocks": sum(r.blocks.count for r in self._rows.values() if r.blocks.slots is not None),
            "resident_blocks_due": self.due_tokens // self.page_size,
            **self.bounds.describe(),
        }
