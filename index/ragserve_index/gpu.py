"""Copies of indexes on a GPU, for unfiltered searches. Changes and saves use the CPU structure."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import ref

import numpy as np

from ragserve.errors import Unavailable
from ragserve_index.structures.base import Floats, Results, Structure, id_map_of, load_faiss
from ragserve_index.structures.flat import Flat
from ragserve_index.structures.ivf import Ivf

log = logging.getLogger(__name__)

ON_GPU = (Flat.name, Ivf.name)  # FAISS has no GPU form of the other two
MAX_K = 1024
MAX_PROBES = 2048  # FAISS's limit of lists that a GPU search probes


@dataclass
class _GpuCopy:
    """The copy of one generation of a structure. ``index`` is None if the GPU could not take or search it."""

    structure: ref[Structure]
    generation: int
    index: Any


class GpuMirror:
    """Searches on GPU 0, one at a time, because FAISS's GPU resources serve one thread.

    The first search after a change copies the index anew. Filtered searches, types without a GPU form, k >
    1024 and more than 2,048 probed lists run on the CPU structure: without cuVS, FAISS's GPU indexes take no
    id selector. So does everything while the GPU has no room for the copy, which is logged once and tried
    again after the next change."""

    def __init__(self) -> None:
        """Raises Unavailable when FAISS was built without CUDA, or sees no GPU."""
        faiss = load_faiss()
        problem = hint = ""
        if not hasattr(faiss, "StandardGpuResources"):
            problem = f"FAISS {faiss.__version__} has no GPU support"
            hint = "Install faiss-gpu-cuvs (CUDA 13) or faiss-gpu (CUDA 12) in place of faiss-cpu"
        elif faiss.get_num_gpus() < 1:
            problem, hint = "FAISS sees none", "Check nvidia-smi and CUDA_VISIBLE_DEVICES"
        if problem:
            raise Unavailable(
                f"The index should use a GPU, but {problem}.",
                hint=f"{hint}, or use --index-device cpu.",
                code="gpu_index_unavailable",
            )
        self._faiss = faiss
        self._resources = faiss.StandardGpuResources()
        self._lock = Lock()
        self._copies: dict[int, _GpuCopy] = {}

    def search(self, structure: Structure, queries: Floats, k: int) -> Results:
        """Search as :meth:`Structure.search` without a selection. The caller holds the index's read lock."""
        probes = structure.probes(k, structure.count) if isinstance(structure, Ivf) else 0
        if structure.name not in ON_GPU or k > MAX_K or probes > MAX_PROBES:
            return structure.search(queries, k)
        with self._lock:
            found = self._search(self._copy_of(structure), queries, k, probes)
        if found is None:
            return structure.search(queries, k)
        scores, ids = found
        if (ids[:, -1] < 0).any():
            return structure.search(queries, k)
        return (scores, id_map_of(structure.index)[ids]) if isinstance(structure, Flat) else (scores, ids)

    def _copy_of(self, structure: Structure) -> _GpuCopy:
        """The copy of the structure as it is now. The caller holds the lock: copies are also freed here, not
        where a structure is dropped, because freeing uses the resources that a search in another thread uses.
        """
        for key in [key for key, copy in self._copies.items() if copy.structure() is None]:
            del self._copies[key]
        copy = self._copies.get(id(structure))
        if copy is None or copy.generation != structure.generation:
            self._copies.pop(id(structure), None)
            copy = None  # frees its memory before the next copy takes as much
            copy = _GpuCopy(ref(structure), structure.generation, self._copied(structure))
            self._copies[id(structure)] = copy
        return copy

    def _copied(self, structure: Structure) -> Any:
        # Of a flat index the rows alone: FAISS would also copy the maps between ids and rows, on the CPU.
        source = structure.index.index if isinstance(structure, Flat) else structure.index
        started = time.perf_counter()
        try:
            copied = self._faiss.index_cpu_to_gpu(self._resources, 0, source)
        except RuntimeError as error:
            _warn(structure, "cannot be copied to the GPU", error)
            return None
        log.debug("%d vectors copied to the GPU in %.2f s", structure.count, time.perf_counter() - started)
        return copied

    def _search(self, copy: _GpuCopy, queries: Floats, k: int, probes: int) -> Results | None:
        if copy.index is None:
            return None
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        try:
            if not probes:
                scores, ids = copy.index.search(queries, k)
            else:
                params = self._faiss.SearchParametersIVF(nprobe=probes)
                scores, ids = copy.index.search(queries, k, params=params)
        except RuntimeError as error:
            _warn(copy.structure(), "cannot be searched on the GPU", error)
            copy.index = None
            return None
        return scores, ids


def _warn(structure: Structure | None, problem: str, error: RuntimeError) -> None:
    count = structure.count if structure else 0
    log.warning("an index of %d vectors %s, it is searched on the CPU: %s", count, problem, error)
