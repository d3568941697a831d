"""Document registry and vector indexes: SQLite holds everything, FAISS is derived from it. See README.md."""

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
