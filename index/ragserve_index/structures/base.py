"""What an index structure can do, and what a filter selects. Structures hold vectors and ids, and know
nothing of SQLite.
"""

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
    """The module, imported at the first use; Any, because the stubs it brings miss half of it."""
    import faiss

    return faiss


BITMAP_MAX_IDS = (
    1 << 26
)  # 8 MiB of bits; beyond it a hash set is smaller than a bitmap over all ids ever given


class IdSelection:
    """The ids a search may return: ascending, unique, all of them in the index. May be shared between
    threads.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self._selector: Any = None
        self._positions: tuple[object, int, Ids] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def selector(self) -> Any:
        """A faiss.IDSelector over the ids, made once. FAISS only reads it, so threads may share it, unlike
        search parameters.
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
        """Where the ids stand in ascending ``id_map``, remembered for one state of one structure."""
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

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.generation = 0  # grows with each change

    @property
    @abstractmethod
    def count(self) -> int:
        """Vectors a search can find."""

    @property
    def tombstones(self) -> int:
        """Removed vectors that still take space."""
        return 0

    @property
    @abstractmethod
    def index(self) -> Any:
        """The FAISS index, to save or to copy to a GPU."""

    @abstractmethod
    def ids(self) -> Ids:
        """All ids a search can find, ascending."""

    @abstractmethod
    def add(self, ids: Ids, vectors: Floats) -> None:
        """Add vectors [n, dim]; ids ascending, above all that were ever added, never used before."""

    @abstractmethod
    def remove(self, ids: Ids) -> int:
        """Remove those of the ids that are there; how many were."""

    @abstractmethod
    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        """The k best per query, k at most the number of candidates: ``count``, or the selection's length.
        Never fewer than k.
        """

    def state(self) -> dict[str, Any]:
        """What, beside FAISS's own bytes, it takes to load it again; JSON."""
        return {}

    def write(self, sink: Callable[[bytes], int]) -> None:
        """Serialise into ``sink``, piece by piece."""
        faiss = load_faiss()

        faiss.write_index(self.index, faiss.PyCallbackIOWriter(sink, 1 << 22))


def search_plain(index: Any, queries: Floats, k: int) -> Results:
    """``index.search(queries, k)`` without the Python wrapper's conversions, which cost 2 us: as much as a
    fiftieth of a graph search.
    """
    if queries.dtype != np.float32 or not queries.flags.c_contiguous or queries.shape[1] != index.d or k < 1:
        return index.search(queries, k)  # has its own checks
    pointer = load_faiss().swig_ptr
    n = len(queries)
    scores, ids = np.empty((n, k), dtype=np.float32), np.empty((n, k), dtype=np.int64)
    index.search_c(n, pointer(queries), k, pointer(scores), pointer(ids), None)
    return scores, ids


def search_positions(storage: Any, id_map: Ids, queries: Floats, k: int, positions: Ids) -> Results:
    """Exact search over the rows at ``positions`` of an IndexFlat, and only over them: no scan of the others."""
    faiss = load_faiss()

    scores, found = storage.search(
        queries, k, params=faiss.SearchParameters(sel=faiss.IDSelectorArray(positions))
    )
    return scores, np.where(found < 0, -1, id_map[np.maximum(found, 0)])
