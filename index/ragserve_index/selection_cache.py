"""A bounded cache of what filters select."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from ragserve_index.structures.base import IdSelection

_ENTRY_IDS = 512  # cost of an entry besides its ids, in ids


class SelectionCache:
    """Selections by (namespace id, version, filter), least recently used out first, bounded by the number of
    ids. A version never changes, so an entry cannot become wrong. Thread-safe.
    """

    def __init__(self, max_ids: int = 4 << 20) -> None:
        self._max_ids = max_ids
        self._ids = 0
        self._lock = Lock()
        self._selections: OrderedDict[tuple[int, int, str], IdSelection] = OrderedDict()

    def get(self, key: tuple[int, int, str]) -> IdSelection | None:
        with self._lock:
            found = self._selections.get(key)
            if found is not None:
                self._selections.move_to_end(key)
            return found

    def add(self, key: tuple[int, int, str], selection: IdSelection) -> None:
        with self._lock:
            if key in self._selections:
                return
            self._selections[key] = selection
            self._ids += len(selection) + _ENTRY_IDS
            while self._ids > self._max_ids and self._selections:
                _, oldest = self._selections.popitem(last=False)
                self._ids -= len(oldest) + _ENTRY_IDS
