"""Pages of offloaded requests: numbers, most of which have memory of their own on the host."""

from __future__ import annotations

from typing import Protocol

from sglang_ext.documents.pages.host import pin_pool
from sglang_ext.documents.pages.types import IntegrityError, KvShape


class Elsewhere(Protocol):
    """KV of pages that lies in other memory, which is kept until it is released."""

    def release(self) -> None:
        """Keep it no longer."""


class HostPages:
    """A pool of pages and who owns them. Scheduler thread only.

    A page holds a page of SGLang's pool in all layers: ``[2 (K, V), layers, kv_heads, page, head_dim]``. A
    page whose KV lies elsewhere is a number and no more: it names the page's statistics. Numbers from
    ``capacity`` on have no memory, and such pages get them first; the memory of others that they get lies
    idle meanwhile.

    Attributes:
        capacity: pages with memory. numbers: of all pages.
    """

    def __init__(self, shape: KvShape, budget_bytes: int, *, pin: bool, numbers: int = 0) -> None:
        """``numbers``: of pages, at least; as many as the budget holds have memory."""
        self.shape = shape
        self.capacity = budget_bytes // shape.page_bytes
        self.numbers = max(self.capacity, numbers)
        self.pool = shape.empty_pages(self.capacity)
        self._free = list(range(self.capacity - 1, -1, -1))
        self._bare = list(range(self.numbers - 1, self.capacity - 1, -1))  # free ones without memory
        self._owned: dict[int, list[int]] = {}  # by owner
        self._elsewhere: dict[int, tuple[int, Elsewhere]] = {}  # how many of them, the first ones
        if pin and self.capacity:
            pin_pool(self.pool)

    @property
    def used(self) -> int:
        """Pages that hold KV in memory of their own."""
        return sum(map(len, self._owned.values())) - self.elsewhere

    @property
    def elsewhere(self) -> int:
        """Pages whose KV lies elsewhere."""
        return sum(count for count, _ in self._elsewhere.values())

    def allocate(self, owner: int, count: int) -> list[int] | None:
        """Give ``owner``, who has none, this many pages; None if there are fewer.

        Raises:
            IntegrityError: the owner has pages.
        """
        self._expect_none(owner)
        if count > len(self._free):
            return None
        pages = self._owned[owner] = self._take(count)
        return pages

    def name(self, owner: int, count: int, kv: Elsewhere) -> list[int] | None:
        """`allocate` pages whose KV is ``kv``, which is released with them; None, and it is not, if there are
        fewer."""
        self._expect_none(owner)
        bare = min(count, len(self._bare))
        if count - bare > len(self._free):
            return None
        pages = self._owned[owner] = [*(self._bare.pop() for _ in range(bare)), *self._take(count - bare)]
        self._elsewhere[owner] = count, kv
        return pages

    def extend(self, owner: int, count: int) -> list[int] | None:
        """Give ``owner``, who has pages, so many more, with memory; None, and none of them, if there are
        fewer."""
        if count > len(self._free):
            return None
        more = self._take(count)
        self._owned[owner] = [*self._owned[owner], *more]
        return more

    def shrink(self, owner: int, count: int) -> None:
        """Take the pages back that ``owner`` got last by `extend`, ``count`` of them."""
        if count:
            own = self._owned[owner]
            self._give_back(own[-count:])
            self._owned[owner] = own[:-count]

    def release(self, owner: int) -> None:
        """Take an owner's pages back."""
        self._give_back(self._owned.pop(owner))
        if (kept := self._elsewhere.pop(owner, None)) is not None:
            kept[1].release()

    def check(self, owners: set[int]) -> None:
        """Raise IntegrityError unless each page is free or belongs to one of ``owners``, and to one only."""
        if set(self._owned) != owners:
            raise IntegrityError(
                f"host pages belong to requests {sorted(self._owned)}, and offloaded are {sorted(owners)}"
            )
        pages = [*self._free, *self._bare, *(page for own in self._owned.values() for page in own)]
        if sorted(pages) != list(range(self.numbers)):
            raise IntegrityError(
                f"{len(pages)} host pages are free or owned, {len(set(pages))} of them different, expected "
                f"{self.numbers}"
            )

    def _expect_none(self, owner: int) -> None:
        if owner in self._owned:
            raise IntegrityError(f"request {owner} has host pages already")

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def _give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):
            (self._free if page < self.capacity else self._bare).append(page)
