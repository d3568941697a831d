"""Bounded caches of what never changes: chunk rows by id, and what a filter selects in one version of a
namespace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from ragserve_index.structures.base import IdSelection
from ragserve_index.types import Chunk


class ChunkCache:
    """Chunks by id, oldest out first, bounded by their text. Ids are never reused, so an entry cannot become
    wrong.
    """

    def __init__(self, max_chars: int = 16 << 20) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._lock = Lock()
        self._chunks: dict[int, Chunk] = {}
        self.get = (
            self._chunks.get
        )  # the dict's own method: no lock, and no call of ours on the way of a search

    def add(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                if chunk.chunk_id not in self._chunks:
                    self._chunks[chunk.chunk_id] = chunk
                    self._chars += len(chunk.text) + _ROW_CHARS
            while self._chars > self._max_chars:
                oldest = self._chunks.pop(next(iter(self._chunks)))
                self._chars -= len(oldest.text) + _ROW_CHARS


_ROW_CHARS = 512  # what a row costs beside its text


class SelectionCache:
    """Selections by (namespace id, version, filter), least recently used out first, bounded by the ids they
    hold.
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
            self._ids += len(selection) + _ROW_CHARS
            while self._ids > self._max_ids and self._selections:
                _, oldest = self._selections.popitem(last=False)
                self._ids -= len(oldest) + _ROW_CHARS
