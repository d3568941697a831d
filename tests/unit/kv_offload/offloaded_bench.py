"""A pool of KV, a prefix cache and one request in them, for tests of offloaded requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats
from ragserve_kernels.paged import PagedBatch, PageSelection
from ragserve_kernels.sparse_decode import sparse_decode
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.host.host_pages import HostPages
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.versions import leave_tree, protected_tokens
from sglang_ext.wire.protocol import OffloadCounts
from tests.unit import request_shapes

LAYERS, HEADS, DIM, LIMIT = 2, 2, 64, 4
POOL, PROMPT, TAIL = 60, 20, 3  # pages


class Allocator:
    """Whole pages; the first one is the dummy page, which nobody gets."""

    def __init__(self, pages: int, page: int) -> None:
        self.page = page
        self.size = (pages - 1) * page
        self.pages = list(range(1, pages))
        self.segments = 0  # freed without looking for their pages

    def available_size(self) -> int:
        return len(self.pages) * self.page

    def alloc(self, tokens: int) -> torch.Tensor | None:
        count = tokens // self.page
        if count > len(self.pages):
            return None
        taken, self.pages = self.pages[:count], self.pages[count:]
        return (torch.tensor(taken)[:, None] * self.page + torch.arange(self.page)).flatten()

    def free(self, slots: torch.Tensor) -> None:
        back = torch.unique(slots // self.page).tolist()
        assert not set(back) & {0, *self.pages}, "freed twice, or the dummy page"
        self.pages += back

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        pages = slots.view(-1, self.page)
        assert start_pos % self.page == 0
        assert torch.equal(pages, pages[:, :1] // self.page * self.page + torch.arange(self.page))
        self.segments += 1
        self.free(slots)


class Tree:
    """A tree that holds ``locked`` pages until their lock goes; ``evict`` frees what is unlocked."""

    def __init__(self, allocator: Allocator) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.root_node = "root"
        self.cached: torch.Tensor | None = None
        self.locks = 0

    def inc_lock_ref(self, node: str) -> None:
        self.locks += node != self.root_node

    def dec_lock_ref(self, node: str) -> None:
        self.locks -= node != self.root_node

    def lock(self, node: str) -> str:
        self.inc_lock_ref(node)
        return node

    def unlock(self, lock: str | None) -> None:
        if lock is not None:
            self.dec_lock_ref(lock)

    def evictable_size(self) -> int:
        return 0 if self.cached is None or self.locks else len(self.cached)

    def evict(self, params: Any) -> None:
        if self.cached is not None and not self.locks:
            self.token_to_kv_pool_allocator.free(self.cached)
            self.cached = None


class Bench:
    """A request of ``PROMPT`` pages, of which the tree holds ``cached``, and ``TAIL`` decoded ones."""

    def __init__(
        self,
        cached: int = PROMPT,
        host: int = PROMPT + TAIL,
        resident_blocks: int = 2,
        page: int = 16,
        *,
        shared: bool = False,
        more: int = 0,
        contexts: ContextTable | None = None,
    ) -> None:
        """``resident_blocks``: for each page of a selection; 0: as its working set takes. ``shared``: layers
        and heads share them. ``more``: pages without memory of their own. ``contexts``: of progressive
        requests."""
        torch.manual_seed(3)
        self.page = page
        self.resident_blocks = resident_blocks
        self.shared = shared
        self.allocator = Allocator(POOL, page)
        self.tree = Tree(self.allocator)
        k, v = ([torch.randn(POOL * self.page, HEADS, DIM) for _ in range(LAYERS)] for _ in range(2))
        self.kv = KVLayers(k, v)
        self.table = torch.zeros(4, (PROMPT + TAIL + 4) * self.page, dtype=torch.int32)
        slots = self.allocator.alloc((PROMPT + TAIL) * self.page)
        assert slots is not None
        self.table[1, : len(slots)] = slots
        self.original = KVLayers([each.clone() for each in k], [each.clone() for each in v])
        self.row_before = self.table[1].clone()
        if cached:
            self.tree.cached = slots[: cached * self.page]
        self.req: Any = request_shapes.request(
            row=1,
            protected=cached * self.page,
            rid="r",
            finished=lambda: False,
            to_finish=None,
        )
        request_shapes.lock(self.tree, self.req, "node" if cached else "root")
        shape = KvShape(LAYERS, HEADS, DIM, torch.float32, self.page)
        self.pages = HostPages(shape, host * shape.page_bytes, pin=False, numbers=host + more)
        statistics = PageStats.zeros(self.kv, self.page, 4, self.pages.numbers)
        for layer in range(LAYERS):
            keys = self.kv.k[layer].view(POOL, self.page, HEADS, DIM)
            statistics.store(layer, torch.arange(POOL), keys)
        self.statistics = statistics
        pool = SimpleNamespace(k_buffer=k, v_buffer=v)
        self.rows = OffloadedRows(pool, self.table, self.page, self.pages, statistics, contexts)
        self.rows.attach(self.tree, Ranks())

    def begun(self) -> OffloadedRow:
        row = self.rows.begin(
            self.req, PROMPT * self.page + 1, LIMIT, self.resident_blocks, OffloadCounts(), shared=self.shared
        )
        assert row is not None
        return row

    def copied(self) -> OffloadedRow:
        row = self.begun()
        self.rows.copy()
        assert row.copied == PROMPT
        return row

    def moved(self, selection: PageSelection) -> tuple[OffloadedRow, PageSelection]:
        row = self.copied()
        self.rows.before_schedule(lambda row: False)
        placed = self.rows.load(row, selection)
        self.rows.before_schedule(lambda row: True)
        assert self.arrives(row, placed)
        assert row.moved
        return row, placed

    def arrives(self, row: OffloadedRow, selection: PageSelection) -> bool:
        """Let a step begin that reads a selection."""
        self.rows.join()
        return self.rows.arrive(row, selection)

    def ended(self, row: OffloadedRow) -> None:
        """Free the request as the tree does, and find everything free."""
        self.rows.release(row)
        protected, tokens = protected_tokens(self.req), (PROMPT + TAIL) * self.page
        slots = self.table[1, protected:tokens].long()
        if row.moved:
            held, tail = self.req.ragserve_resident_blocks
            assert not row.blocks.placed or torch.equal(held.int(), self.table[1, protected:tail])
            slots = torch.cat((held, self.table[1, tail:tokens].long()))
            assert len(slots) == tokens - protected, "SGLang counts as many"
        self.allocator.free(slots)
        leave_tree(self.tree, self.req)
        self.tree.evict(None)
        assert sorted(self.allocator.pages) == list(range(1, POOL))
        assert self.pages.used == 0
        self.rows.check()

    def counted(self, row: OffloadedRow) -> None:
        """Let SGLang's account of a moved request be its resident blocks and its tail, and all pages be
        somewhere.
        """
        held, end = self.req.ragserve_resident_blocks
        assert (len(held), end) == (end - protected_tokens(self.req), PROMPT * self.page)
        named = self.table[1, : (PROMPT + TAIL) * self.page] // self.page
        assert not {*named.tolist()} & {*self.allocator.pages}, "the request table names no free page"
        own = {*(held // self.page).tolist(), *(self.row_before[end:] // self.page).tolist()} - {0}
        assert len(own) == len(held) // self.page + TAIL
        cached = set() if self.tree.cached is None else set((self.tree.cached // self.page).tolist())
        assert sorted([*own, *cached, *self.allocator.pages]) == list(range(1, POOL))

    def attend(
        self, q: torch.Tensor, kv: KVLayers, row: torch.Tensor, selection: PageSelection
    ) -> torch.Tensor:
        pages = (row[:: self.page] // self.page).int()[None]
        batch = PagedBatch(
            pages, torch.tensor([(PROMPT + TAIL) * self.page - 5], dtype=torch.int32), self.page
        )
        outs = []
        for layer in range(LAYERS):
            in_layer = PageSelection(selection.blocks[layer][None], selection.counts[layer][None])
            with forced_naive():
                outs.append(sparse_decode(q[layer], (kv.k[layer], kv.v[layer]), batch, selection=in_layer))
        return torch.stack(outs)

    def attends(self, selection: PageSelection, placed: PageSelection) -> None:
        """Attend by a selection and to nothing else, and get what the device would give."""
        q = torch.randn(LAYERS, 1, 2 * HEADS, DIM)
        want = self.attend(q, self.original, self.row_before, selection)
        assert torch.equal(self.attend(q, self.poisoned(placed), self.table[1], placed), want)

    def spoil_free_pages(self) -> None:
        for each in (*self.kv.k, *self.kv.v):
            each.view(POOL, self.page, HEADS, DIM)[self.allocator.pages] = torch.nan

    def poisoned(self, selection: PageSelection) -> KVLayers:
        """The pool with NaN wherever this selection does not read."""
        k, v = ([torch.full_like(each, torch.nan) for each in half] for half in (self.kv.k, self.kv.v))
        pages = self.table[1, :: self.page].long() // self.page
        for layer in range(LAYERS):
            for head in range(HEADS):
                count = int(selection.counts[layer, head])
                chosen = pages[selection.blocks[layer, head, :count].long()]
                slots = (chosen[:, None] * self.page + torch.arange(self.page)).flatten()
                k[layer][slots, head] = self.kv.k[layer][slots, head]
                v[layer][slots, head] = self.kv.v[layer][slots, head]
        return KVLayers(k, v)


def drawn(*, near: bool = False) -> PageSelection:
    """The first page, the newest, and others, ``near``: of the first; entries past the count are junk."""
    newest = PROMPT + TAIL - 1
    blocks = torch.full((LAYERS, HEADS, LIMIT + 2), 10**6, dtype=torch.int32)
    for layer in range(LAYERS):
        for head in range(HEADS):
            others = torch.randperm(3 if near else newest - 1)[: LIMIT - 2] + 1
            blocks[layer, head, :LIMIT] = torch.cat((torch.tensor([0, newest]), others))
    return PageSelection(blocks, torch.full((LAYERS, HEADS), LIMIT, dtype=torch.int32))
