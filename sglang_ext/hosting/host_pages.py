"""Pages in host memory for the KV of hosted requests, each request's its own."""

from __future__ import annotations

from sglang_ext.documents.host import pin_pool
from sglang_ext.documents.types import IntegrityError, KvShape


class HostPages:
    """A pool of pages and who owns them. Scheduler thread only.

    A page holds a page of SGLang's pool in all layers: ``[2 (K, V), layers, kv_heads, page, head_dim]``."""

    def __init__(self, shape: KvShape, budget_bytes: int, *, pin: bool) -> None:
        self.shape = shape
        self.capacity = budget_bytes // shape.page_bytes
        self.pool = shape.empty_pages(self.capacity)
        self._free = list(range(self.capacity - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}  # by owner
        if pin and self.capacity:
            pin_pool(self.pool)

    @property
    def used(self) -> int:
        """Pages that are not free."""
        return self.capacity - len(self._free)

    def allocate(self, owner: int, count: int) -> list[int] | None:
        """Give ``owner``, who has none, this many pages; None if there are fewer.

        Raises:
            IntegrityError: the owner has pages.
        """
        if owner in self._owned:
            raise IntegrityError(f"request {owner} has host pages already")
        if count > len(self._free):
            return None
        pages = self._owned[owner] = [self._free.pop() for _ in range(count)]
        return pages

    def extend(self, owner: int, count: int) -> list[int] | None:
        """Give ``owner``, who has pages, so many more; None, and none of them, if there are fewer."""
        if count > len(self._free):
            return None
        more = [self._free.pop() for _ in range(count)]
        self._owned[owner] = [*self._owned[owner], *more]
        return more

    def shrink(self, owner: int, count: int) -> None:
        """Take the pages back that ``owner`` got last, ``count`` of them."""
        if count:
            own = self._owned[owner]
            self._free.extend(reversed(own[-count:]))
            self._owned[owner] = own[:-count]

    def release(self, owner: int) -> None:
        """Take an owner's pages back."""
        self._free.extend(reversed(self._owned.pop(owner)))

    def check(self, owners: set[int]) -> None:
        """Raise IntegrityError unless each page is free or belongs to one of ``owners``, and to one only."""
        if set(self._owned) != owners:
            raise IntegrityError(
                f"host pages belong to requests {sorted(self._owned)}, and hosted are {sorted(owners)}"
            )
        pages = [*self._free, *(page for own in self._owned.values() for page in own)]
        if sorted(pages) != list(range(self.capacity)):
            raise IntegrityError(
                f"{len(pages)} host pages are free or owned, {len(set(pages))} of them different, expected "
                f"{self.capacity}"
            )
