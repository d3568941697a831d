"""Copies of indexes on a GPU, for unfiltered searches. Changes and saves use the CPU structure."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from ragserve.errors import Unavailable
from ragserve_index.structures.base import Floats, Results, Structure, load_faiss

ON_GPU = ("flat", "ivf")  # FAISS has no GPU form of the other two
MAX_K = 1024


class GpuMirror:
    """Searches on GPU 0, one at a time, because FAISS's GPU resources serve one thread.

    The first search after a change copies the index anew. Filtered searches, types without a GPU form and
    k > 1024 run on the CPU structure: FAISS's GPU indexes take no id selector."""

    def __init__(self) -> None:
        """Raises Unavailable when FAISS was built without CUDA, or sees no GPU."""
        faiss = load_faiss()
        problem = hint = ""
        if not hasattr(faiss, "StandardGpuResources"):
            problem = f"FAISS {faiss.__version__} has no GPU support"
            hint = "Install faiss-gpu in place of faiss-cpu"
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
        self._copies: WeakKeyDictionary[Structure, tuple[int, Any]] = WeakKeyDictionary()

    def search(self, structure: Structure, queries: Floats, k: int) -> Results:
        """Search as :meth:`Structure.search` without a selection. The caller holds the index's read lock."""
        if structure.name not in ON_GPU or k > MAX_K:
            return structure.search(queries, k)
        with self._lock:
            generation, copy = self._copies.get(structure, (-1, None))
            if generation != structure.generation:
                self._copies.pop(structure, None)  # frees its memory first
                copy = self._faiss.index_cpu_to_gpu(self._resources, 0, structure.index)
                self._copies[structure] = (structure.generation, copy)
            scores, ids = copy.search(queries, k)
        return structure.search(queries, k) if (ids[:, -1] < 0).any() else (scores, ids)
