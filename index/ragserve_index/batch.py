"""Validation of a batch of documents, before a transaction starts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragserve.errors import InvalidRequest
from ragserve_index.structures.base import Floats
from ragserve_index.types import NewChunk, NewDocument

_UNIT_TOLERANCE = 1e-3
_INT64 = 2**63


def document_id(namespace_name: str, source: str) -> str:
    """The stable id of a source in a namespace."""
    return "doc_" + hashlib.sha256(f"{namespace_name}\0{source}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated document of a batch: its id, metadata as JSON, and vectors [n_chunks, dim]."""

    document: NewDocument
    doc_id: str
    metadata: str
    chunks: Sequence[NewChunk]
    vectors: Floats


def prepare(
    namespace: str, dim: int, batch: Iterable[tuple[NewDocument, Sequence[NewChunk], Any]]
) -> list[Prepared]:
    """Validate a batch. Raises InvalidRequest that names the document."""
    prepared: list[Prepared] = []
    seen: set[str] = set()
    for document, chunks, vectors in batch:
        place = f"document {document.source!r}"
        if not document.source or "\0" in document.source:
            raise InvalidRequest(
                f"{place}: a source must not be empty nor contain NUL.", code="invalid_source"
            )
        if document.source in seen:
            raise InvalidRequest(f"{place} appears twice in one batch.", code="duplicate_source")
        seen.add(document.source)
        array = np.ascontiguousarray(vectors, dtype="<f4")
        if array.shape != (len(chunks), dim):
            raise InvalidRequest(
                f"{place}: vectors of shape {list(array.shape)} for {len(chunks)} chunks "
                f"of {dim} components.",
                code="invalid_vectors",
            )
        # false for NaN, too
        if len(array) and not (np.abs(np.einsum("nd,nd->n", array, array) - 1) <= 2 * _UNIT_TOLERANCE).all():
            raise InvalidRequest(f"{place}: vectors must be finite and of length 1.", code="invalid_vectors")
        for chunk in chunks:
            if not 0 <= chunk.start <= chunk.end:
                raise InvalidRequest(
                    f"{place}: a chunk from {chunk.start} to {chunk.end}.", code="invalid_chunk"
                )
            if chunk.sentences is not None and chunk.sentences.steps.shape != (len(chunk.sentences), dim):
                raise InvalidRequest(
                    f"{place}: sentences of shape {list(chunk.sentences.steps.shape)}, expected [n, {dim}].",
                    code="invalid_vectors",
                )
        doc_id = document_id(namespace, _encodable(document.source, place))
        prepared.append(Prepared(document, doc_id, _metadata(document.metadata, place), chunks, array))
    return prepared


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{place}: text with a lone surrogate cannot be stored.", code="invalid_text"
        ) from None
    return text


def _storable(value: object) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, int):
        return -_INT64 <= value < _INT64
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _metadata(metadata: Any, place: str) -> str:
    for key, value in metadata.items():
        parts = value if isinstance(value, list) else [value]
        wrong = hint = ""
        if not isinstance(key, str):
            wrong = f"key {key!r} is not text"
        elif isinstance(value, list) and not all(isinstance(part, str) for part in value):
            wrong = f"{key!r} is a list of something other than text"
        elif bad := [part for part in [key, *parts] if not _storable(part)]:
            wrong = f"{key!r} has a value that cannot be stored: {bad[0]!r:.60}"
            hint = "Values: text without NUL, finite numbers of 64 bits, true, false, null, lists of text."
        if wrong:
            raise InvalidRequest(
                f"{place}: metadata {wrong}.", hint=hint, code="invalid_metadata", param="metadata"
            )
    return _encodable(json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")), place)
