"""How many slots of the KV pool running requests hold; what is cached for nobody in particular can be evicted
and does not count.
"""

from __future__ import annotations

from typing import Any


class SlotUsage:
    """Of one scheduler process, on its thread."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._most = 0

    def count(self) -> None:
        """A forward pass begins: what it writes to is reserved."""
        self._most = max(self._most, self._now())

    def take(self) -> dict[str, int]:
        """``now``, ``most`` since the last call, and ``total``."""
        now = self._now()
        found = {"now": now, "most": max(self._most, now), "total": self._pool.size}
        self._most = now
        return found

    @property
    def _pool(self) -> Any:
        return self._tree.token_to_kv_pool_allocator

    def _now(self) -> int:
        return int(self._pool.size - self._pool.available_size() - self._tree.evictable_size())
