"""The interface of index structures, and the selection of a filter. Structures know nothing of SQLite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Results = tuple[Floats, Ids]
"""Scores [n, k] float32, best first, and ids [n, k] int64; -1 where there is no further result."""


@cache
def load_faiss() -> Any:
    """Import FAISS at the first use. Typed Any, because its stubs lack half of it."""
    import faiss

    return faiss


# 8 MiB of bits. Beyond it a hash set is smaller than a bitmap over all ids ever used.
BITMAP_MAX_IDS = 1 << 26


class IdSelection:
    """The ids that a search may return: ascending, unique, all in the index. May be shared
    between threads.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self._selector: Any = None
        self._positions: tuple[object, int, Ids] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def selector(self) -> Any:
        """A faiss.IDSelector over the ids, made once. Threads may share it, unlike search parameters: FAISS
        only reads it.
        """
        if self._selector is None:
            faiss = load_faiss()
            top = int(self.ids[-1]) if len(self.ids) else 0
            if top < BITMAP_MAX_IDS:
                bits = np.zeros((top // 8 + 1) * 8, dtype=bool)
                bits[self.ids] = True
                self._selector = faiss.IDSelectorBitmap(np.packbits(bits, bitorder="little"))
            else:
                self._selector = faiss.IDSelectorBatch(self.ids)
        return self._selector

    def positions(self, owner: object, generation: int, id_map: Ids) -> Ids:
        """Positions of the ids in ascending ``id_map``, cached for one generation of one structure."""
        found = self._positions
        if found is None or found[0] is not owner or found[1] != generation:
            places = np.searchsorted(id_map, self.ids).astype(np.int64)
            places = places[places < len(id_map)]
            # an id that is not in the map must not become a neighbour's row, nor one past the end
            found = (owner, generation, places[np.isin(id_map[places], self.ids)])
            self._positions = found
        return found[2]


class Structure(ABC):
    """A FAISS index. Searches may run at once; ``add`` and ``remove`` exclude everything else (the caller
    holds the locks).
    """

    name: ClassVar[str]

    def __init__(self, index: Any) -> None:
        self.index = index  # the FAISS index, to save or to copy to a GPU
        self.dim = int(index.d)
        self.generation = 0  # grows with each change

    @property
    def count(self) -> int:
        """Number of vectors that a search can find."""
        return int(self.index.ntotal)

    @property
    def tombstones(self) -> int:
        """Number of removed vectors that still take space."""
        return 0

    @abstractmethod
    def ids(self) -> Ids:
        """Return all ids that a search can find, ascending."""

    def add(self, ids: Ids, vectors: Floats) -> None:
        """Add vectors [n, dim]. Ids are ascending and above all that were ever added."""
        self.index.add_with_ids(vectors, ids)
        self.generation += 1

    @abstractmethod
    def remove(self, ids: Ids) -> int:
        """Remove the ids that are present and return their number."""

    @abstractmethod
    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        """The k best per query. k is at most the number of candidates (``count``, or the selection's length),
        and never fewer than k are found.
        """

    def vectors(self, ids: Ids) -> Floats:
        """The vectors [n, dim] of ids that are present, as they are stored."""
        found: Floats = self.index.reconstruct_batch(ids)
        return found

    def why_rebuild(self) -> str | None:
        """Give the reason to rebuild the structure at its present size; None if there is none."""
        return None

    def state(self) -> dict[str, Any]:
        """JSON that, with FAISS's own bytes, restores the structure."""
        return {}

    def write(self, sink: Callable[[bytes], int]) -> None:
        """Serialise into ``sink``, piece by piece."""
        faiss = load_faiss()
        faiss.write_index(self.index, faiss.PyCallbackIOWriter(sink, 1 << 22))


def id_map_of(index: Any) -> Ids:
    """The ids of an IndexIDMap: a view of FAISS's own array, valid until the next change."""
    n = index.id_map.size()
    return load_faiss().rev_swig_ptr(index.id_map.data(), n) if n else np.empty(0, dtype=np.int64)


def search_plain(index: Any, queries: Floats, k: int) -> Results:
    """``index.search(queries, k)`` without the Python wrapper's conversions, which cost 2 us: 2 % of a graph
    search.
    """
    if queries.dtype != np.float32 or not queries.flags.c_contiguous or queries.shape[1] != index.d or k < 1:
        return index.search(queries, k)  # has its own checks
    pointer = load_faiss().swig_ptr
    n = len(queries)
    scores, ids = np.empty((n, k), dtype=np.float32), np.empty((n, k), dtype=np.int64)
    index.search_c(n, pointer(queries), k, pointer(scores), pointer(ids), None)
    return scores, ids


def search_positions(storage: Any, id_map: Ids, queries: Floats, k: int, positions: Ids) -> Results:
    """Exact search over the rows at ``positions`` of an IndexFlat, without scanning the others."""
    faiss = load_faiss()
    scores, found = storage.search(
        queries, k, params=faiss.SearchParameters(sel=faiss.IDSelectorArray(positions))
    )
    return scores, np.where(found < 0, -1, id_map[np.maximum(found, 0)])
