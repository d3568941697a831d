"""Counts the slots of the KV pool that running requests hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache


class SlotUsage:
    """KV slots held by running requests; evictable cached slots are not counted. Scheduler thread only."""

    def __init__(self, tree: DocumentRadixCache) -> None:
        self._tree = tree
        self._most = 0

    def count(self) -> None:
        """Sample at the start of a forward pass, when the slots it writes to are reserved."""
        self._most = max(self._most, self._now())

    def take(self) -> dict[str, int]:
        """Return ``now``, the ``most`` since the last call, and the pool's ``total``."""
        now = self._now()
        found = {"now": now, "most": max(self._most, now), "total": self._pool.size}
        self._most = now
        return found

    @property
    def _pool(self) -> Any:
        return self._tree.token_to_kv_pool_allocator

    def _now(self) -> int:
        return int(self._pool.size - self._pool.available_size() - self._tree.evictable_size())
