"""Inverted lists: vectors grouped by the nearest of ``nlist`` centroids; a search probes ``nprobe`` groups.

A plain ``IndexIVFFlat`` with our ids in its lists and a hashtable direct map, so that ``remove_ids`` finds
them. It must never be wrapped in ``IndexIDMap2``: removal from a list moves its last entry into the gap, and
the wrapper's positions would then refer to other vectors."""

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
    load_faiss,
    search_plain,
)


def lists_for(n: int) -> int:
    """Number of lists for n vectors: 4 sqrt(n), FAISS's advice up to a million."""
    return max(1, min(65_536, round(4 * math.sqrt(n))))


def probes_for(nlist: int) -> int:
    """Number of lists that a search probes: a thirty-second of them, at least 16."""
    return min(nlist, max(16, nlist // 32))


class Ivf(Structure):
    """Inverted lists over vectors as float32."""

    name = "ivf"
    # From here on 4 sqrt(n) lists have the 39 points each that k-means needs; below, flat is fast enough.
    TRAIN_FROM = 25_000
    POINTS_PER_LIST = 64
    RETRAIN_GROWTH = 4  # at this many times the trained number: twice the lists
    RETRAIN_SHRINK = 8
    CANDIDATES_PER_RESULT = 8  # selected vectors that the probed lists should hold, per result

    def __init__(self, index: Any, trained_on: int) -> None:
        super().__init__(index)
        self.trained_on = trained_on
        self._nlist = int(index.nlist)
        self._nprobe = index.nprobe = probes_for(self._nlist)

    @classmethod
    def train(cls, sample: Floats, n: int) -> Ivf:
        """An empty structure with centroids for ``n`` vectors from ``sample`` [m, dim]."""
        faiss = load_faiss()
        dim = sample.shape[1]
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists_for(n), faiss.METRIC_INNER_PRODUCT)
        index.cp.spherical = True  # normalised centroids: inner product ranks them as distance would
        index.cp.max_points_per_centroid = cls.POINTS_PER_LIST
        index.cp.seed = 1234
        index.train(sample)
        index.set_direct_map_type(faiss.DirectMap.Hashtable)
        return cls(index, n)

    def ids(self) -> Ids:
        faiss = load_faiss()
        lists = self.index.invlists
        parts = [
            faiss.rev_swig_ptr(lists.get_ids(i), size)
            for i in range(self._nlist)
            if (size := lists.list_size(i))
        ]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    def remove(self, ids: Ids) -> int:
        faiss = load_faiss()
        self.generation += 1
        return int(self.index.remove_ids(faiss.IDSelectorArray(ids)))  # the hashtable takes no other selector

    def probes(self, k: int, candidates: int) -> int:
        """Number of lists to probe for the k best of ``candidates`` vectors.

        As many candidates as an unfiltered search would score, and enough for k: a selective filter probes
        more lists, up to all."""
        wanted = max(self._nprobe * self.count, self._nlist * k * self.CANDIDATES_PER_RESULT)
        return min(self._nlist, math.ceil(wanted / max(1, candidates)))

    def search(self, queries: Floats, k: int, selection: IdSelection | None = None) -> Results:
        faiss = load_faiss()
        nlist = self._nlist
        nprobe = self.probes(k, self.count if selection is None else len(selection))
        selector = None if selection is None else selection.selector()
        if selection is None and nprobe == self._nprobe:
            scores, ids = search_plain(self.index, queries, k)
        else:
            params = faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)
            scores, ids = self.index.search(queries, k, params=params)
        if nprobe < nlist and (ids[:, -1] < 0).any():  # too few vectors in the probed lists: probe all
            params = faiss.SearchParametersIVF(nprobe=nlist, sel=selector)
            scores, ids = self.index.search(queries, k, params=params)
        return scores, ids

    def state(self) -> dict[str, Any]:
        return {"trained_on": self.trained_on}

    def why_rebuild(self) -> str | None:
        if (
            self.count >= self.trained_on * self.RETRAIN_GROWTH
            or self.count < self.trained_on // self.RETRAIN_SHRINK
        ):
            return f"its lists are for {self.trained_on:,} vectors, now there are {self.count:,}"
        return None
