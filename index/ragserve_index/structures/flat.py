"""Exact search: compare every vector, as float32 (flat) or quantised to 8 bits a component (sq8). Both are
wrapped in ``IndexIDMap2``.
"""

from __future__ import annotations

from typing import Any

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

# A selection below 1/8 of the rows is scored row by row; above it, scanning all with a bitmap is as fast.
SCAN_SHARE = 8


class MappedStructure(Structure):
    """An IndexIDMap2 around an index that keeps rows in the order of insertion, so its ids are ascending."""

    def ids(self) -> Ids:
        return id_map_of(self.index).copy()

    def remove(self, ids: Ids) -> int:
        self.generation += 1
        return int(self.index.remove_ids(ids))

    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        if selection is None:
            return search_plain(self.index, queries, k)
        # parameters of this call alone: IndexIDMap rewrites their selector while it searches
        parameters = load_faiss().SearchParameters(sel=selection.selector())
        return self.index.search(queries, k, params=parameters)


class Flat(MappedStructure):
    """Vectors as float32."""

    name = "flat"

    @classmethod
    def empty(cls, dim: int) -> Flat:
        """A structure without vectors."""
        faiss = load_faiss()
        return cls(faiss.IndexIDMap2(faiss.IndexFlatIP(dim)))

    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        if selection is None or len(selection) * SCAN_SHARE > self.count:
            return super().search(queries, k, selection)
        id_map = id_map_of(self.index)
        positions = selection.positions(self, self.generation, id_map)
        storage = load_faiss().downcast_index(self.index.index)
        return search_positions(storage, id_map, queries, k, positions)


class Sq8(MappedStructure):
    """Vectors in 8 bits a component. The range of each component is learnt from the vectors, widened by a
    tenth on both sides.
    """

    name = "sq8"
    TRAIN_FROM = 1_000  # fewer vectors do not determine the ranges: flat until then
    TRAIN_SAMPLE = 65_536
    RETRAIN_GROWTH = 8  # ranges from a small sample are learnt again at this many times more vectors

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

    def why_rebuild(self) -> str | None:
        if self.trained_on < self.TRAIN_SAMPLE and self.count >= self.trained_on * self.RETRAIN_GROWTH:
            return f"its ranges come from {self.trained_on:,} vectors, now there are {self.count:,}"
        return None
