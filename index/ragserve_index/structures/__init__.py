"""The index types of namespaces, and the structure that serves each type at a given size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from ragserve.errors import InvalidRequest
from ragserve_index.structures.base import Floats, Structure, load_faiss
from ragserve_index.structures.flat import Flat, Sq8
from ragserve_index.structures.hnsw import Hnsw
from ragserve_index.structures.ivf import Ivf, lists_for
from ragserve_index.types import IndexType

INDEX_TYPES: tuple[str, ...] = get_args(IndexType)


def check_type(index_type: str) -> str:
    """Return the type if it is known, else raise InvalidRequest. No FAISS factory string passes."""
    if index_type not in INDEX_TYPES:
        raise InvalidRequest(
            f"No index type {index_type!r}.",
            hint=f"Types are: {', '.join(INDEX_TYPES)}.",
            code="invalid_index_type",
            param="index_type",
        )
    return index_type


def create(index_type: str, dim: int, n: int, sample: Callable[[int], Floats]) -> Structure:
    """An empty structure for ``n`` vectors; ``sample(m)`` returns up to m of them, [m, dim], to train on."""
    if index_type == "hnsw":
        return Hnsw.empty(dim)
    if index_type == "sq8" and n >= Sq8.TRAIN_FROM:
        return Sq8.train(sample(Sq8.TRAIN_SAMPLE))
    if index_type == "ivf" and n >= Ivf.TRAIN_FROM:
        return Ivf.train(sample(lists_for(n) * Ivf.POINTS_PER_LIST), n)
    return Flat.empty(dim)


def why_rebuild(index_type: str, structure: Structure) -> str | None:
    """Give the reason to rebuild the structure at its present size; None if there is none."""
    for kind in (Sq8, Ivf):
        if isinstance(structure, Flat) and index_type == kind.name and structure.count >= kind.TRAIN_FROM:
            return f"there are {structure.count:,} vectors now, enough to train {index_type} on"
    return structure.why_rebuild()


def load(name: str, index: Any, state: dict[str, Any]) -> Structure:
    """The structure ``name`` around an index that FAISS has read. Raises ValueError if they do not match."""
    faiss = load_faiss()
    expected: dict[str, tuple[Callable[..., Structure], type, type | None]] = {
        "flat": (Flat, faiss.IndexIDMap2, faiss.IndexFlat),
        "sq8": (Sq8, faiss.IndexIDMap2, faiss.IndexScalarQuantizer),
        "ivf": (Ivf, faiss.IndexIVFFlat, None),
        "hnsw": (Hnsw, faiss.IndexIDMap, faiss.IndexHNSWFlat),
    }
    if name not in expected:
        raise ValueError(f"no structure {name!r}")
    kind, outer, inner = expected[name]
    sound = index.metric_type == faiss.METRIC_INNER_PRODUCT and type(index) is outer
    if not sound or (inner is not None and not isinstance(faiss.downcast_index(index.index), inner)):
        raise ValueError(f"a {type(index).__name__} is not a {name} index")
    return kind(index, int(state["trained_on"])) if name in ("sq8", "ivf") else kind(index)
