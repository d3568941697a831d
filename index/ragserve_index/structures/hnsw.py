"""A navigable graph: approximate, fast at any size, slow to build. FAISS cannot remove from it.

Removed vectors become tombstones: searches still walk over them, a selector keeps them out of the results,
and the graph is rebuilt when they are more than a fifth of it. Graphs fail with selective filters (the few
selected nodes are too far apart to be reached), so a small selection is scored exactly, and a larger one
widens the search in proportion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ragserve_index.structures.base import (
    Floats,
    Ids,
    IdSelection,
    Results,
    Structure,
    id_map_of,
    load_faiss,
    search_plain,
    search_positions,
)


class Hnsw(Structure):
    """An HNSW graph with tombstones."""

    name = "hnsw"
    M = 32  # neighbours of a node (twice that at the bottom)
    EF_CONSTRUCTION = 128
    EF_SEARCH = 128  # candidates a search keeps
    EXACT_MAX = 10_000  # a selection up to this, or up to a tenth of the graph, is scored exactly
    EXACT_SHARE = 10
    TOMBSTONE_SHARE = 5  # rebuilt when more than 1/5 of the graph is tombstones

    def __init__(self, index: Any, tombstones: Ids | None = None) -> None:
        faiss = load_faiss()
        super().__init__(index)
        inner = faiss.downcast_index(index.index)
        inner.hnsw.efConstruction = self.EF_CONSTRUCTION
        inner.hnsw.efSearch = self.EF_SEARCH
        self._storage = faiss.downcast_index(inner.storage)
        self._dead: Ids = np.empty(0, dtype=np.int64)
        self._alive_selector: Any = None
        if tombstones is not None and len(tombstones):
            self.remove(tombstones)

    @classmethod
    def empty(cls, dim: int) -> Hnsw:
        """A graph without nodes."""
        faiss = load_faiss()
        # IndexIDMap, not IDMap2: nothing is looked up by id, and the map back would cost 50 bytes a vector
        return cls(faiss.IndexIDMap(faiss.IndexHNSWFlat(dim, cls.M, faiss.METRIC_INNER_PRODUCT)))

    @property
    def count(self) -> int:
        return super().count - len(self._dead)

    @property
    def tombstones(self) -> int:
        return len(self._dead)

    def ids(self) -> Ids:
        return np.setdiff1d(id_map_of(self.index), self._dead, assume_unique=True)

    def remove(self, ids: Ids) -> int:
        faiss = load_faiss()
        before = len(self._dead)
        self._dead = np.union1d(self._dead, np.intersect1d(ids, id_map_of(self.index)))
        self._alive_selector = (
            faiss.IDSelectorNot(faiss.IDSelectorBatch(self._dead)) if len(self._dead) else None
        )
        self.generation += 1
        return len(self._dead) - before

    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        if selection is None and k * self.EXACT_SHARE <= self.count:
            scores, ids = self._graph(queries, k, self._alive_selector, self.count)
        elif selection is not None and len(selection) > max(
            self.EXACT_MAX, self.index.ntotal // self.EXACT_SHARE, k * self.EXACT_SHARE
        ):
            scores, ids = self._graph(queries, k, selection.selector(), len(selection))
        else:
            return self._exact(queries, k, selection)
        if (ids[:, -1] < 0).any():  # parts of the graph may be unreachable
            return self._exact(queries, k, selection)
        return scores, ids

    def vectors(self, ids: Ids) -> Floats:
        positions = np.searchsorted(id_map_of(self.index), ids).astype(np.int64)
        found: Floats = self._storage.reconstruct_batch(positions)
        return found

    def _graph(self, queries: Floats, k: int, selector: Any, candidates: int) -> Results:
        if selector is None:
            return search_plain(self.index, queries, k)
        faiss = load_faiss()
        width = math.ceil(self.EF_SEARCH * self.index.ntotal / candidates)
        return self.index.search(queries, k, params=faiss.SearchParametersHNSW(efSearch=width, sel=selector))

    def _exact(self, queries: Floats, k: int, selection: IdSelection | None) -> Results:
        id_map = id_map_of(self.index)
        positions = (
            np.searchsorted(id_map, self.ids())
            if selection is None
            else selection.positions(self, self.generation, id_map)
        )
        return search_positions(self._storage, id_map, queries, k, positions)

    def why_rebuild(self) -> str | None:
        if len(self._dead) * self.TOMBSTONE_SHARE > self.index.ntotal:
            return f"{len(self._dead):,} of its {self.index.ntotal:,} nodes are tombstones"
        return None
