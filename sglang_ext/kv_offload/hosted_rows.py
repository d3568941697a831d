"""The hosted requests of one rank: copies to the host, columns, and loads into them.

Ranks decide by lengths, options and counts of free slots and pages, which are the same on all of them:
nothing is voted on. What SGLang allocates and frees changes before it schedules (`before_schedule`), on its
own stream; copies and loads are launched behind forward passes, on a stream beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ragserve_kernels.column_assign import Columns
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats
from ragserve_kernels.paged import PageSelection
from sglang_ext.documents.fill import DocumentKv, fill_pages
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.kv_offload.host.host_pages import HostPages
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.resident.cell_loads import CellLoads
from sglang_ext.kv_offload.resident.cells import Cells, CellTable
from sglang_ext.kv_offload.resident.column_check import differing
from sglang_ext.kv_offload.resident.column_slots import ColumnSlots
from sglang_ext.kv_offload.resident.columns import EMPTY, ColumnTable
from sglang_ext.kv_offload.resident.hosted_row import HostedCounts, HostedRow
from sglang_ext.kv_offload.resident.page_loads import PageLoads
from sglang_ext.kv_offload.resident.working_set import HostingBounds, resized
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.stages import stages
from sglang_ext.tensors.buffers import upload

STEP_BYTES = 128 * 2**20  # copied to the host beside one decode step: 3 ms of a link of 50 GB/s


class HostedRows:
    """Scheduler thread only. ``attach`` has to be called before the first request."""

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
        self.cells = Cells(self.kv, page_size, pages.numbers)
        self.contexts = contexts
        self._loads = PageLoads(pages.pool, self.kv, contexts)
        self.copies = CopyStream(self.kv.device)
        self._cell_loads = CellLoads(self._loads, self.copies)
        self._rows: dict[int, HostedRow] = {}  # by owner
        self.waiting: dict[int, HostPrefix] = {}  # by owner, of requests that are in no batch
        self._owners = 0
        self.joins: list[Any] = []  # loads and copies of slots that are free again
        self._tree: Any = None
        self.bounds = HostingBounds()
        self.statistics_of = torch.full(
            (req_to_token.shape[0], -(-req_to_token.shape[1] // page_size)),
            -1,
            dtype=torch.int32,
            device=self.kv.device,
        )
        """Where the statistics of a request's pages lie, by its row of the request table; -1: with the
        page."""

    def attach(self, tree: Any, ranks: Ranks) -> None:
        """``tree``: SGLang's prefix cache, ours. ``ranks``: those that vote."""
        self._tree = tree
        self.slots = ColumnSlots(tree, self.table, self.page_size, self.copies)
        self.bounds.ranks = ranks

    @property
    def ready(self) -> bool:
        """False where the prefix cache is not ours: nothing can be hosted then."""
        return self._tree is not None

    # behind a forward pass

    def begin(
        self, req: Any, tokens: int, choice: int, columns: int, counts: HostedCounts, *, shared: bool = False
    ) -> HostedRow | None:
        """Take a request in, and copy the statistics of its pages.

        Args:
            tokens: of the request in the step just launched, which writes the last of them.
            choice: pages of a choice, at most.
            columns: for each of them; 0: as many as its working set takes.
            counts: its own, to go on with.
            shared: as in `HostedRow`.

        Returns:
            None if the bounds do not allow it, or the prompt takes no more pages than its columns would.
        """
        pages, fixed = (tokens - 1) // self.page_size, columns > 0
        columns = self.columns_of(choice, columns)
        if pages <= columns:
            return None
        if not self.may_begin():
            return None
        owned = self.own(pages)
        if owned is None:
            return None
        owner, numbers, host = owned
        try:
            slots = self.table[req.req_pool_idx, : pages * self.page_size].long()
            self.statistics.copy(slots[:: self.page_size] // self.page_size, self.first_host + host)
        except BaseException:  # nobody knows the row, so nobody would release it
            self.pages.release(owner)
            raise
        row = HostedRow(
            *(req, owner, req.req_pool_idx, choice, columns, fixed, shared),
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
        """Return a new owner of so many host pages, and these, on the host and int32 on the device; None if
        there are fewer. ``context``: holds their KV."""
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

    def add(self, row: HostedRow) -> None:
        """Take in a request that has moved already."""
        self._rows[row.owner] = row

    def remove(self, row: HostedRow) -> None:
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

    def load(self, row: HostedRow, choice: PageSelection, lag: int = 0) -> PageSelection:
        """Load what a choice misses, and return it with columns in place of hosted pages; ``lag`` as that of
        `CellLoads.begin`.

        A request without columns keeps its prompt on the device, and its choice as it is."""
        if row.table is None or row.column_pages is None:
            return choice
        choice = PageSelection(choice.blocks.contiguous(), choice.counts.contiguous())
        blocks, counts = choice
        if isinstance(row.table, CellTable):
            self._cell_loads.begin(row, row.table, choice, lag=lag)
            return choice
        pages, own = self._loads.pages(row)
        with self.copies.behind(blocks, counts, *own, row.column_pages, *row.table.tensors):
            found = row.table.assign(choice, pages, row.column_pages)
            begun = self.copies.event()
            self._loads.to_columns(row, found.source, found.target)
            tally = found.tally
            if tally.is_cuda:
                tally = tally.to("cpu", non_blocking=True)
            row.loaded = self.copies.event()
        row.arriving.append((begun, row.loaded, tally))
        row.late = found if row.n_columns < 2 * row.choice else None
        row.has_load = True
        # where `_place` puts its column
        return PageSelection(found.placed, counts)

    def load_rest(self, row: HostedRow) -> None:
        """Load what the step just launched has not written to cells itself."""
        self._cell_loads.rest(row)

    def _load_late(self, row: HostedRow, late: Columns, table: ColumnTable) -> None:
        """Load what could not be loaded while the choice before was read, on the current stream."""
        if row.column_pages is None:
            raise IntegrityError("a request without columns has pages to load into them")
        pages, own = self._loads.pages(row)
        self.copies.await_on_current(row.loaded, late.late_pages, late.late_columns, *own, row.column_pages)
        is_none = late.late_pages < 0
        self._loads.to_columns(
            row,
            pages[late.late_pages.clamp_min(0).long()].masked_fill_(is_none, EMPTY),
            row.column_pages[late.late_columns.clamp_min(0).long()],
        )
        with self.copies.behind(late.late_pages, late.late_columns):
            table.settle(late)

    def count_reads(self, counts: HostedCounts, pages: int, head_bytes: int) -> None:
        """Count pages of KV heads, of so many bytes, that a step of a request has read from the host
        itself."""
        counts.host_reads += pages
        counts.loaded_bytes += pages * head_bytes
        self.bounds.link.loaded(pages * head_bytes, 0, None)

    def arrive(self, row: HostedRow, choice: PageSelection) -> bool:
        """Let the step that reads a choice follow its loads.

        Return False if it must not read it: the request was to move and could not, and ends with an error."""
        if not row.has_load:
            return True  # made when the request had no columns: of its pages on the device
        self.load_rest(row)
        self.copies.await_on_current(row.loaded, choice.blocks)
        row.has_load = False
        if isinstance(row.table, CellTable):
            row.table.arrive()
        row.collect()
        if not row.moved:
            return False
        if row.late is not None and isinstance(row.table, ColumnTable):
            self._load_late(row, row.late, row.table)  # the choice before is not read any more
            row.late = None
        row.leave_after -= 1
        return True

    def settle(self) -> None:
        """Forget columns and contexts that are gone."""
        self.cells.settle()
        if self.contexts is not None:
            self.contexts.settle()

    def _place(self, row: HostedRow) -> None:
        """Write a request's columns into the request table: column c in place of its last prompt page but c.

        Pages before them are the pool's dummy page. On the stream of the forward passes: steps that have been
        launched and still wait there copy the table first."""
        held, end = row.req.ragserve_columns
        self.copies.await_on_current(None, held)
        begin, page = end - len(held), self.page_size
        self.table[row.request, begin:end] = held.to(self.table.dtype)
        dummy = torch.arange(page, dtype=self.table.dtype, device=self.table.device)
        self.table[row.request, :begin] = dummy.repeat(begin // page)
        self.statistics_of[row.request, : row.pages] = self.first_host + row.host
        row.placed = True

    def join(self) -> None:
        """Let the forward pass at hand follow loads into columns and copies of prompts that have been given
        back, and put the columns of requests that have moved into the request table: it must not name pages
        that others may get, and a prefill may come before their next step.
        """
        for event in self.joins:
            self.copies.await_on_current(event)
        self.joins.clear()
        self.settle()
        if self.documents is not None:
            self.copies.follow()
        for row in self._rows.values():
            if row.moved and not row.placed:
                self._place(row)

    # before SGLang schedules

    def before_schedule(self, reads_next: Callable[[HostedRow], bool]) -> bool:
        """Reserve columns and move requests. Return whether one has moved, which leaves room for others.

        ``reads_next``: whether a row's next step is the first to read the choice that was loaded."""
        moved = False
        if self.documents is not None:
            self.documents.poll()
        for row in self._rows.values():
            if row.moved:
                if row.leaving:
                    stages.run_alike("hosting", stages.ending([row.req]), self.slots.give_back, row)
            elif row.columns is None:
                if row.copied == row.pages:
                    stages.run_alike("hosting", stages.ending([row.req]), self._reserve, row)
            elif row.has_load and reads_next(row):
                stages.run_alike("hosting", stages.ending([row.req]), self._move, row)
                moved = moved or row.moved
        return moved

    def release(self, row: HostedRow) -> None:
        """Free what a request has; its columns, once it has moved, are freed with its other slots."""
        self.leave(row)
        self.pages.release(row.owner)

    def leave(self, row: HostedRow) -> None:
        """`release`, but for the host pages."""
        row.collect()
        if row.columns is not None and not row.moved:
            row.req.cache_protected_len = row.protected
            self._tree.token_to_kv_pool_allocator.free(row.columns)
        if row.table is not None and row.column_pages is not None:
            row.table.drop(row.column_pages)
        row.filling = False
        if row.loaded is not None:
            self.joins.append(row.loaded)
        if row.request >= 0:  # else its first pass has failed on the way
            self.statistics_of[row.request, : row.pages] = -1
        del self._rows[row.owner]

    def _reserve(self, row: HostedRow) -> None:
        """Take columns out of the pool, if it has room: else the prompt stays, and asks again.

        SGLang counts the slots behind ``cache_protected_len`` as the request's own: the columns, too.
        """
        columns = self.slots.take(row.n_columns)
        if columns is None:
            return
        # noted before what may lack memory, because `release` gives it back
        row.columns, row.protected = columns, row.req.cache_protected_len
        row.req.cache_protected_len -= len(columns)
        row.column_pages = (columns[:: self.page_size] // self.page_size).to(torch.int32)
        row.table = self.new_table(row)

    def new_table(self, row: HostedRow) -> ColumnTable | CellTable:
        """Return a table of a request's columns, which hold nothing yet."""
        if row.shared:
            return CellTable(self.cells, row.n_columns, row.pages, row.choice)
        layers, kv_heads = self.kv.layers, self.kv.kv_heads
        return ColumnTable(layers, kv_heads, row.n_columns, row.pages, self.kv.device)

    def _move(self, row: HostedRow) -> None:
        """Give the prompt up: its cached part may be evicted, its own part is freed.

        The next forward pass may write to its slots, so it follows the copies that read them: a load comes
        after those.
        """
        if row.columns is None:
            raise IntegrityError("a request without columns is to move")
        req, held = row.req, self.slots.in_order(row)
        own = row.slots[row.protected :]
        if len(own):
            self._tree.token_to_kv_pool_allocator.free(own)
        if req.last_node is not None:
            self._tree.dec_lock_ref(req.last_node)
        req.last_node = self._tree.root_node
        self.slots.note(row, held)
        self.joins.append(row.loaded)
        row.moved = True

    def resize(self, rows: Sequence[HostedRow | None], *, others_wait: bool) -> None:
        """Let ranks agree on working sets, and give moved requests the columns that these take.

        ``rows``: those of the running batch, in its order, which is the same on all ranks."""
        sets = self.bounds.exchange(rows)
        for row, pages in zip(rows, sets, strict=True):
            if row is None or not pages or row.fixed or not row.moved:
                continue
            columns = resized(row.n_columns, pages, row.choice, others_wait=others_wait, settled=row.settled)
            stages.run_alike("hosting", stages.ending([row.req]), self.slots.resize, row, columns)

    def columns_of(self, choice: int, columns: int) -> int:
        """Return the columns that a request begins with; arguments as those of `begin`."""
        return columns * choice or self.bounds.first_columns(choice)

    def begin_step(self, now: float) -> None:
        """Count a step that has been launched at ``now``, in seconds, and who waits for columns in it."""
        if any(row.moved for row in self._rows.values()):
            self.bounds.link.step(now)
        else:
            self.bounds.link.pause()
        short = sum(row.columns is None and row.copied == row.pages for row in self._rows.values())
        self.bounds.waiting = Counter(device=short)

    @property
    def due_tokens(self) -> int:
        """Slots to keep free for the columns of the next request that has none yet: the largest of them.

        It leaves more than those to the one after it, when its prompt goes."""
        pending = (row.n_columns for row in self._rows.values() if row.columns is None)
        return self.page_size * max(pending, default=0)

    # order

    def check(self) -> None:
        """Raise IntegrityError where a page is lost, or a column does not hold what its host page does."""
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
            if row.columns is not None and (bad := differing(row, self.kv, self.pages.pool, self.contexts)):
                raise IntegrityError(f"{bad} columns of request {row.req.rid} differ from their host pages")

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
            "columns": sum(row.n_columns for row in self._rows.values() if row.columns is not None),
            "columns_due": self.due_tokens // self.page_size,
            **self.bounds.describe(),
        }
