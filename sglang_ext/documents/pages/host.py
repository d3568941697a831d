"""The host tier: a pool of pages, the documents that own them, and eviction when they run out."""

from __future__ import annotations

import logging
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_ext.documents.pages.types import IntegrityError, KvShape, LoadPart

logger = logging.getLogger(__name__)
_ABSENT = -1


@dataclass(eq=False, slots=True)
class HostEntry:
    """A document with pages on host, with a load in progress, or with a pin."""

    key: str
    namespace: str
    token_ids: array[int]
    pages: array[int]  # int64, per block: page number, or -1
    pins: int = 0  # callers that read the pages
    in_flight: int = 0  # the store's own reads and writes in progress
    removed: bool = False  # but still pinned or in flight: see HostTier.pending_removal
    loading: dict[int, LoadPart] = field(default_factory=dict)
    summary: bytes = b""  # the document's analysis, stored with its pages
    lasting: bool = False  # may be stored below the host
    copied: Any = None  # torch.cuda.Event after which the pages hold what was put

    @property
    def metadata_bytes(self) -> int:
        """Memory of everything but the pages, in bytes."""
        return sum(
            sys.getsizeof(part)
            for part in (self, self.key, self.token_ids, self.pages, self.loading, self.summary)
        )

    @property
    def evictable(self) -> bool:
        """Nobody reads or writes its pages."""
        return self.pins == 0 and self.in_flight == 0

    def resident(self) -> list[int]:
        """Numbers of the pages it has."""
        return [page for page in self.pages if page != _ABSENT]

    @property
    def has_pages(self) -> bool:
        return any(page != _ABSENT for page in self.pages)

    def missing(self) -> list[int]:
        """Blocks without a page."""
        return [block for block, page in enumerate(self.pages) if page == _ABSENT]

    def wait_copied(self) -> None:
        """Wait until the device has finished copying into these pages."""
        copied = self.copied
        if copied is not None:
            copied.synchronize()
            self.copied = None

    def parts_loading(self) -> list[LoadPart]:
        """Loads in progress, each once."""
        return list({id(part): part for part in self.loading.values()}.values())


class HostTier:
    """Pages and the documents in them. Not thread-safe: every caller holds the store's lock."""

    def __init__(self, shape: KvShape, *, budget_bytes: int, pin: bool, scratch_pages: int = 0) -> None:
        self.shape = shape
        self.capacity = max(0, budget_bytes) // shape.page_bytes
        self.limit = self.capacity
        self.evictions = 0
        self.entries: OrderedDict[str, HostEntry] = OrderedDict()  # least recently used first
        self.pending_removal: dict[str, HostEntry] = {}  # removed documents whose pages are still in use
        self._free = list(range(self.capacity - 1, -1, -1))
        self._moving: set[int] = set()  # pages of loads in progress
        self.pool = shape.empty_pages(self.capacity + scratch_pages)
        self.scratch = list(range(self.capacity, self.capacity + scratch_pages))
        self._registered = pin and self.pool.numel() > 0
        if self._registered:
            pin_pool(self.pool)
        self._bytes = self.pool.view(len(self.pool), -1).view(torch.uint8) if len(self.pool) else None

    @property
    def used(self) -> int:
        """Pages that are not free."""
        return self.capacity - len(self._free)

    def page_view(self, page: int) -> torch.Tensor:
        """The page's bytes, uint8 [page_bytes], sharing its memory."""
        if self._bytes is None:
            raise IndexError("the host tier has no pages")
        return self._bytes[page]

    def find(self, key: str) -> HostEntry | None:
        """A document's entry, also one that is pending removal."""
        return self.entries.get(key) or self.pending_removal.get(key)

    def all_entries(self) -> list[HostEntry]:
        """Visible entries and those pending removal."""
        return [*self.entries.values(), *self.pending_removal.values()]

    def add(self, key: str, namespace: str, token_ids: array[int]) -> HostEntry:
        """A new entry without pages; ``settle`` drops it again unless it gets pages, a pin or a load.

        A document that is pending removal gets the entry it has, visible again. With a second one, pins of
        readers of the one would count for the other."""
        if key in self.pending_removal:
            return self._revived(key)
        entry = HostEntry(key, namespace, token_ids, _absent(self.shape.blocks(len(token_ids))))
        self.entries[key] = entry
        return entry

    def allocate(self, count: int, keep: HostEntry) -> list[int] | None:
        """Allocate pages, evicting least recently used documents other than ``keep`` where needed. Returns
        None, and evicts nothing, if that would not be enough.

        The caller owns the pages until ``attach`` or ``give_back``.
        """
        short = count - min(len(self._free), self.limit - self.used)
        victims = []
        for entry in self.entries.values():
            if short <= 0:
                break
            if entry is not keep and entry.evictable:
                victims.append(entry)
                short -= len(entry.resident())
        if short > 0:
            return None
        for entry in victims:
            self._evict(entry)
        pages = [self._free.pop() for _ in range(count)]
        self._moving.update(pages)
        return pages

    def attach(self, entry: HostEntry, blocks: Sequence[int], pages: Sequence[int]) -> None:
        """Give allocated pages to the document. A block that has a page already keeps it, and the new page is
        freed.
        """
        for block, page in zip(blocks, pages, strict=True):
            if entry.pages[block] == _ABSENT:
                entry.pages[block] = page
                self._moving.remove(page)
            else:
                self.give_back([page])

    def give_back(self, pages: Iterable[int]) -> None:
        """Return allocated pages unused."""
        for page in pages:
            self._moving.remove(page)
            self._free.append(page)

    def settle(self, entry: HostEntry) -> None:
        """Free what waited for a pin, read or write that has ended. Evicts nothing: IO threads call this."""
        if entry.evictable:
            if entry.removed:
                self._free_pages(entry)
                self.pending_removal.pop(entry.key, None)
            elif not entry.has_pages and self.entries.get(entry.key) is entry:
                del self.entries[entry.key]

    def remove(self, entry: HostEntry) -> None:
        """Hide the document now and free its pages as soon as nobody uses them."""
        self.entries.pop(entry.key, None)
        entry.removed = True
        self.pending_removal[entry.key] = entry
        self.settle(entry)

    def _revived(self, key: str) -> HostEntry:
        """Make a document visible again: its pages are what the same document would write."""
        entry = self.entries[key] = self.pending_removal.pop(key)
        entry.removed = False
        return entry

    def set_limit(self, budget_bytes: int) -> None:
        """Change the budget, evicting what no longer fits. Raises ValueError above the pool's size."""
        limit = max(0, budget_bytes) // self.shape.page_bytes
        if limit > self.capacity:
            raise ValueError(
                f"the host tier was started with {self.capacity * self.shape.page_bytes} bytes and cannot "
                "grow beyond them: restart with a larger host budget"
            )
        self.limit = limit
        self.shrink()

    def shrink(self) -> None:
        """Evict down to the limit. Documents in use stay until they are released."""
        if self.used <= self.limit:
            return
        for entry in [entry for entry in self.entries.values() if entry.evictable]:
            if self.used <= self.limit:
                return
            self._evict(entry)

    def drop(self, keys: Sequence[str] | None = None) -> int:
        """Evict everything evictable (of ``keys`` only, if given) and return the number of documents."""
        entries = self.entries.values() if keys is None else map(self.entries.get, keys)
        victims = [entry for entry in entries if entry is not None and entry.evictable]
        for entry in victims:
            self._evict(entry)
        return len(victims)

    def check(self) -> None:
        """Raise IntegrityError unless every page has exactly one owner: free, a document or a load."""
        seen: dict[int, str] = {}
        owners = [("free", self._free), ("loading", self._moving)]
        owners += [(entry.key, entry.resident()) for entry in self.all_entries()]
        for owner, pages in owners:
            for page in pages:
                if page in seen or not 0 <= page < self.capacity:
                    raise IntegrityError(
                        f"host page {page} belongs to {owner} and to {seen.get(page, 'nobody: out of range')}"
                    )
                seen[page] = owner
        if len(seen) != self.capacity:
            raise IntegrityError(f"{self.capacity - len(seen)} host pages are lost")
        loading = [
            page for entry in self.all_entries() for part in entry.parts_loading() for page in part.pages
        ]
        if sorted(loading) != sorted(self._moving):
            raise IntegrityError("host pages are allocated to no load")
        for entry in self.entries.values():
            negative = min(entry.pins, entry.in_flight) < 0
            if entry.removed or negative or (entry.evictable and not entry.has_pages):
                raise IntegrityError(f"document {entry.key} should not be in the host tier")
        for entry in self.pending_removal.values():
            if not entry.removed or entry.evictable:
                raise IntegrityError(f"removed document {entry.key} is in use by nobody and still there")
        if self.used > self.limit and any(entry.evictable for entry in self.entries.values()):
            raise IntegrityError(f"{self.used} host pages in use, {self.limit} allowed, and some evictable")

    def close(self) -> None:
        """Unregister the pool from CUDA."""
        if self._registered:
            _unpin_pool(self.pool)
            self._registered = False

    def _evict(self, entry: HostEntry) -> None:
        self._free_pages(entry)
        del self.entries[entry.key]
        self.evictions += 1

    def _free_pages(self, entry: HostEntry) -> None:
        entry.wait_copied()  # the next owner's data must not be overtaken by a copy still on its way
        self._free.extend(reversed(entry.resident()))
        entry.pages = _absent(len(entry.pages))


def _absent(blocks: int) -> array[int]:
    return array("q", [_ABSENT]) * blocks


def pin_pool(pool: torch.Tensor) -> None:
    """Pin the pool's memory. ``pin_memory=True`` would round its size up to a power of two."""
    code = torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(
            f"cannot pin {pool.nbytes} bytes of host memory for documents (cudaHostRegister: {int(code)}): "
            "lower the host budget, or raise the locked-memory limit (ulimit -l)"
        )


def _unpin_pool(pool: torch.Tensor) -> None:
    code = torch.cuda.cudart().cudaHostUnregister(pool.data_ptr())
    if int(code) != 0:
        logger.warning("cudaHostUnregister failed with %d; the memory is freed at exit", int(code))
