"""Validation of a batch of documents, before a transaction starts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ragserve_index.errors import InvalidDocument
from ragserve_index.structures.base import Floats
from ragserve_index.text_forms import forms, normal, storable
from ragserve_index.types import NewChunk, NewDocument
from ragserve_index.viewers import checked_labels

_UNIT_TOLERANCE = 1e-3
_INT64 = 2**63


def document_id(namespace_name: str, source: str) -> str:
    """The stable id of a source in a namespace, whatever form of Unicode it is typed in."""
    return document_ids(namespace_name, source)[0]


def document_ids(namespace_name: str, source: str) -> list[str]:
    """`document_id`, then the ids that earlier versions may have given the source, as it was typed."""
    return [
        "doc_" + hashlib.sha256(f"{namespace_name}\0{form}".encode()).hexdigest()[:24]
        for form in forms(source)
    ]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated document of a batch: its id, metadata as JSON, and vectors [n_chunks, dim]. ``older_ids``
    are other ids under which it may be stored."""

    document: NewDocument
    doc_id: str
    older_ids: Sequence[str]
    metadata: str
    chunks: Sequence[NewChunk]
    vectors: Floats


def prepare(
    namespace: str, dim: int, batch: Iterable[tuple[NewDocument, Sequence[NewChunk], Any]]
) -> list[Prepared]:
    """Validate a batch. Raises InvalidDocument that names the document."""
    prepared: list[Prepared] = []
    seen: set[str] = set()
    for document, chunks, vectors in batch:
        place = f"document {document.source!r}"
        if not document.source or "\0" in document.source:
            raise InvalidDocument(
                f"{place}: a source must not be empty nor contain NUL.", code="invalid_source"
            )
        if normal(document.source) in seen:
            raise InvalidDocument(f"{place} appears twice in one batch.", code="duplicate_source")
        seen.add(normal(document.source))
        array = np.ascontiguousarray(vectors, dtype="<f4")
        if array.shape != (len(chunks), dim):
            raise InvalidDocument(
                f"{place}: vectors of shape {list(array.shape)} for {len(chunks)} chunks "
                f"of {dim} components.",
                code="invalid_vectors",
            )
        # false for NaN, too
        if len(array) and not (np.abs(np.einsum("nd,nd->n", array, array) - 1) <= 2 * _UNIT_TOLERANCE).all():
            raise InvalidDocument(f"{place}: vectors must be finite and of length 1.", code="invalid_vectors")
        for chunk in chunks:
            if not 0 <= chunk.start <= chunk.end:
                raise InvalidDocument(
                    f"{place}: a chunk from {chunk.start} to {chunk.end}.", code="invalid_chunk"
                )
            if chunk.sentences is not None and chunk.sentences.steps.shape != (len(chunk.sentences), dim):
                raise InvalidDocument(
                    f"{place}: sentences of shape {list(chunk.sentences.steps.shape)}, expected [n, {dim}].",
                    code="invalid_vectors",
                )
        for text in (document.source, document.title, *(chunk.text for chunk in chunks)):
            _encodable(text, place)
        doc_id, *older = document_ids(namespace, document.source)
        labels = None if document.labels is None else checked_labels(document.labels)
        document = replace(document, title=normal(document.title), labels=labels)
        metadata = metadata_json(document.metadata, place)
        prepared.append(Prepared(document, doc_id, older, metadata, chunks, array))
    return prepared


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidDocument(
            f"{storable(place)}: text with a lone surrogate cannot be stored.", code="invalid_text"
        ) from None
    return text


def _storable(value: object) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, int):
        return -_INT64 <= value < _INT64
    return value is None or (isinstance(value, float) and math.isfinite(value))


def metadata_json(metadata: Any, place: str) -> str:
    """Metadata as it is stored, its text in one normal form. Raises InvalidDocument, which calls the document
    ``place``."""
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
            raise InvalidDocument(
                f"{place}: metadata {wrong}.", hint=hint, code="invalid_metadata", param="metadata"
            )
    own = {normal(key): _normal(value) for key, value in metadata.items()}
    return _encodable(json.dumps(own, ensure_ascii=False, separators=(",", ":")), place)


def _normal(value: Any) -> Any:
    if isinstance(value, list):
        return [normal(part) for part in value]
    return normal(value) if isinstance(value, str) else value
