"""Document registry and vector indexes: SQLite holds everything, FAISS is derived from it. See README.md.

A name's module is imported on its first use: the parsing process needs a type and no numpy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragserve_index.evictions import Eviction, EvictionLog
    from ragserve_index.filters import And, AnyFilter, Eq, Filter, In, Not, Or, Range, parse_filter
    from ragserve_index.jobs import JobStore
    from ragserve_index.store import IndexStore
    from ragserve_index.types import (
        Chunk,
        Document,
        Hit,
        IndexReport,
        IndexType,
        Job,
        JobItem,
        MetadataValue,
        NamespaceInfo,
        NewChunk,
        NewDocument,
        SearchResult,
    )

__all__ = [
    "And",
    "AnyFilter",
    "Chunk",
    "Document",
    "Eq",
    "Eviction",
    "EvictionLog",
    "Filter",
    "Hit",
    "In",
    "IndexReport",
    "IndexStore",
    "IndexType",
    "Job",
    "JobItem",
    "JobStore",
    "MetadataValue",
    "NamespaceInfo",
    "NewChunk",
    "NewDocument",
    "Not",
    "Or",
    "Range",
    "SearchResult",
    "parse_filter",
]
_MODULES = {
    "Eviction": "evictions",
    "EvictionLog": "evictions",
    "IndexStore": "store",
    "JobStore": "jobs",
    **dict.fromkeys(
        ("And", "AnyFilter", "Eq", "Filter", "In", "Not", "Or", "Range", "parse_filter"), "filters"
    ),
}  # all others: types


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'types')}"), name)
