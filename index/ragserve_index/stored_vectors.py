"""Vectors of chunks and of their sentences, as the registry has them."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from ragserve_index.database import Connection
from ragserve_index.registry import Namespace
from ragserve_index.sentence_vectors import SentenceVectors
from ragserve_index.structures.base import Floats
from ragserve_index.viewers import Viewer
from ragserve_index.visible import sees


def sentence_vectors(
    connection: Connection, ns: Namespace, chunk_ids: Iterable[int], viewer: Viewer
) -> dict[int, SentenceVectors]:
    """The embedded sentences of the viewer's chunks that have some, by chunk id."""
    rows = connection.execute(
        f"SELECT s.chunk_id, s.data, d.labels FROM {connection.dialect.integers} wanted"
        " CROSS JOIN sentences s CROSS JOIN chunks c CROSS JOIN documents d"
        " WHERE s.chunk_id = wanted.value AND c.chunk_id = s.chunk_id AND d.id = c.document"
        " AND d.namespace_id = ?",
        (json.dumps(list(chunk_ids)), ns.id),
    )
    return {
        chunk_id: SentenceVectors.decode(data, ns.dim)
        for chunk_id, data, labels in rows
        if sees(viewer, labels)
    }


def document_vectors(connection: Connection, ns: Namespace, doc_id: str) -> Floats:
    """The vectors of a document's chunks that are searched, [n, dim] float32, in their order."""
    rows = connection.execute(
        "SELECT v.data FROM documents d JOIN vectors v ON v.document = d.id"
        " WHERE d.namespace_id = ? AND d.doc_id = ? ORDER BY v.first_id",
        (ns.id, doc_id),
    )
    data = b"".join(row[0] for row in rows)
    return np.frombuffer(data, dtype="<f4").reshape(-1, ns.dim)
