"""Documents of the host tier that offloaded requests read in place: each pinned once, its readers counted."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragserve_kernels.context_gather import HostCodes
from sglang_ext.documents.pages.stored_pages import StoredPages
from sglang_ext.documents.pages.types import IntegrityError, KvShape
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.tensors.buffers import Ints
from sglang_ext.tensors.rope import Rotation

if TYPE_CHECKING:
    from sglang_ext.documents.tier_store import TierStore


def as_host(pool: torch.Tensor, shape: KvShape) -> torch.Tensor | HostCodes:
    """Return pages of documents as `context_gather` takes them."""
    if shape.bits != 8:
        return pool
    return HostCodes(pool, shape.layers, shape.kv_heads, shape.block, shape.head_dim)


@dataclass(frozen=True, eq=False, slots=True)
class WantedDocument:
    """A document of a namespace to be read. ``blocks``: int64, those of its pages that are."""

    key: str
    namespace: str
    token_ids: array[int]
    blocks: Ints


class HostDocuments:
    """Keeps pages of documents where they are while requests read them: a pinned document is not evicted, and
    one that is removed is not found any more, but its pages wait for the last reader. Scheduler thread only.

    At most half of the host tier is kept like this: the other half stays for documents that come."""

    def __init__(
        self, tiers: TierStore, rotation: Rotation, copies: CopyStream, device: torch.device
    ) -> None:
        """``tiers``: the `TierStore`. ``rotation``: of heads whose halves rotate. ``device``: that reads the
        pages."""
        self.pages: StoredPages = tiers.pages
        self.host = as_host(self.pages.pool, self.pages.shape)
        self.device = device
        self.rotation = rotation
        self._tiers = tiers
        self._copies = copies
        self._readers: Counter[str] = Counter()  # by document
        self._sizes: dict[str, int] = {}  # pages of each
        self._leaving: deque[tuple[Any, tuple[str, ...]]] = deque()  # behind events, in order

    @property
    def used(self) -> int:
        """Pages of the host tier that are kept, each counted once."""
        return sum(self._sizes.values())

    @property
    def documents(self) -> int:
        """Documents that are kept."""
        return len(self._sizes)

    @property
    def leaving(self) -> bool:
        """True while documents that no request reads any more are kept, until the device has passed them."""
        return bool(self._leaving)

    @property
    def most(self) -> int:
        """Pages of the host tier that may be kept."""
        return int(self._tiers.host_limit) // 2

    def hold(self, wanted: Sequence[WantedDocument]) -> list[Ints] | None:
        """Keep these documents until as many `let_go`. Return the numbers of each one's pages, int64.

        None, and nothing is kept, if a page that is read is not on the host, or they would take more than
        half of it."""
        self.poll()
        found: list[Ints] = []
        kept: list[str] = []
        done = False
        try:
            for each in wanted:
                pages = self._tiers.host_pages(each.key, each.token_ids, each.namespace)
                if pages is None or bool((pages[each.blocks] < 0).any()):
                    break
                if each.key not in self._readers:
                    self._tiers.pin(each.key)  # before any other call of the store
                self._readers[each.key] += 1
                self._sizes[each.key] = int((pages >= 0).sum())  # more may have come since it was pinned
                kept.append(each.key)
                found.append(pages)
            done = len(found) == len(wanted) and self.used <= self.most
        finally:
            if not done:
                self._unpin(kept)
        return found if done else None

    def let_go(self, keys: Sequence[str]) -> None:
        """Undo a `hold` of these documents, once the device has run what it was given so far."""
        if (event := self._copies.all_so_far()) is None:
            self._unpin(keys)
        else:
            self._leaving.append((event, tuple(keys)))

    def poll(self) -> None:
        """Unpin the documents that the device has read for the last time."""
        while self._leaving and self._leaving[0][0].query():
            self._unpin(self._leaving.popleft()[1])

    def check(self, keys: Sequence[str]) -> None:
        """Raise IntegrityError unless requests hold just these documents, given once for each, or have let
        them go."""
        self.poll()
        held = Counter(keys)
        for _, leaving in self._leaving:
            held.update(leaving)
        if held != self._readers:
            raise IntegrityError(
                f"offloaded requests read {held.total()} documents in place, and "
                f"{self._readers.total()} are kept for them"
            )

    def _unpin(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key], self._sizes[key]
                self._tiers.unpin(key)

    def turns(self, shifts: Ints) -> torch.Tensor:
        """Return cos and sin of keys' angles for these shifts, float32 [n, 2, rotary_dim / 2], on the CPU."""
        return torch.stack(self.rotation.angles(torch.from_numpy(shifts)), 1)
