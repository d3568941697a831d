"""Plain data of the index: what goes in, what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MetadataValue = str | int | float | bool | None | list[str]


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A run of a document's text: ``document_text[start:end] == text``. ``page`` counts from 1 where the format has pages."""

    text: str
    start: int
    end: int
    n_tokens: int
    page: int | None = None


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to index. ``source`` (absolute path, URL or given name) identifies it within its namespace; the same source replaces it."""

    source: str
    title: str
    content_hash: str  # hex digest of the bytes it was parsed from and of the settings that shape its chunks
    mime: str
    size_bytes: int
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Document:
    """An indexed document. Times are Unix seconds. ``doc_id`` depends on namespace and source alone, so it survives replacement."""

    doc_id: str
    namespace: str
    source: str
    title: str
    content_hash: str
    mime: str
    size_bytes: int
    n_chunks: int
    n_tokens: int
    created_at: float
    updated_at: float
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """An indexed chunk with what a citation needs of its document. ``chunk_id`` is a positive int64, never reused."""

    chunk_id: int
    doc_id: str
    ordinal: int
    text: str
    start: int
    end: int
    page: int | None
    n_tokens: int
    source: str
    title: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved chunk; ``score`` is the inner product of L2-normalised vectors (cosine), higher is better."""

    chunk: Chunk
    score: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits per query, best first, all read at one version of the namespace."""

    hits: list[list[Hit]]
    version: int


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace. ``version`` grows by one with each committed change to its documents."""

    name: str
    embedder: str
    dim: int
    index_type: str
    version: int
    n_documents: int
    n_chunks: int
    n_tokens: int
