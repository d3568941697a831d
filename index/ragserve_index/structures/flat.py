"""Exact search: every vector compared, as float32 (flat) or quantised to 8 bits a component (sq8).
``IndexIDMap2`` around both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ragserve_index.structures.base import (
    Floats,
    Ids,
    IdSelection,
    Results,
    Structure,
    load_faiss,
    search_plain,
    search_positions,
)

# a selection below 1/8 of the rows is scored row by row; above it, scanning all with a bitmap is as fast
SCAN_SHARE = 8


class MappedStructure(Structure):
    """An IndexIDMap2 around an index that keeps rows in the order they came, so its ids are ascending."""

    def __init__(self, index: Any) -> None:
        super().__init__(index.d)
        self._index = index

    @property
    def index(self) -> Any:
        return self._index

    @property
    def count(self) -> int:
        return int(self._index.ntotal)

    def _id_map(self) -> Ids:
        """A view of FAISS's own array, valid until the next change."""
        faiss = load_faiss()

        n = self._index.id_map.size()
        return faiss.rev_swig_ptr(self._index.id_map.data(), n) if n else np.empty(0, dtype=np.int64)

    def ids(self) -> Ids:
        return self._id_map().copy()

    def add(self, ids: Ids, vectors: Floats) -> None:
        self._index.add_with_ids(vectors, ids)
        self.generation += 1

    def remove(self, ids: Ids) -> int:
        self.generation += 1
        return int(self._index.remove_ids(ids))

    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        if selection is None:
            return search_plain(self._index, queries, k)
        faiss = load_faiss()

        # parameters of this call alone: IndexIDMap rewrites their selector while it searches
        return self._index.search(queries, k, params=faiss.SearchParameters(sel=selection.selector()))


class Flat(MappedStructure):
    name = "flat"

    @classmethod
    def empty(cls, dim: int) -> Flat:
        faiss = load_faiss()

        return cls(faiss.IndexIDMap2(faiss.IndexFlatIP(dim)))

    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        if selection is None or len(selection) * SCAN_SHARE > self.count:
            return super().search(queries, k, selection)
        faiss = load_faiss()

        id_map = self._id_map()
        positions = selection.positions(self, self.generation, id_map)
        return search_positions(faiss.downcast_index(self._index.index), id_map, queries, k, positions)


class Sq8(MappedStructure):
    """A quarter of the memory. The range of each component is learnt from the vectors there are, widened by a
    tenth on both sides.
    """

    name = "sq8"
    TRAIN_FROM = 1_000  # fewer vectors say too little about the range of a component: kept flat until then
    TRAIN_SAMPLE = 65_536
    RETRAIN_GROWTH = (
        8  # ranges learnt from a small start are learnt again when there are this many times more vectors
    )

    def __init__(self, index: Any, trained_on: int) -> None:
        super().__init__(index)
        self.trained_on = trained_on

    @classmethod
    def train(cls, sample: Floats) -> Sq8:
        """An empty structure with ranges from ``sample`` [n, dim]."""
        faiss = load_faiss()

        inner = faiss.IndexScalarQuantizer(
            sample.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
        inner.sq.rangestat = faiss.ScalarQuantizer.RS_minmax
        inner.sq.rangestat_arg = 0.1
        inner.train(sample)
        return cls(faiss.IndexIDMap2(inner), len(sample))

    def state(self) -> dict[str, Any]:
        return {"trained_on": self.trained_on}

    def wants_training(self) -> str | None:
        if self.trained_on < self.TRAIN_SAMPLE and self.count >= self.trained_on * self.RETRAIN_GROWTH:
            return f"its ranges come from {self.trained_on:,} vectors, now there are {self.count:,}"
        return None
