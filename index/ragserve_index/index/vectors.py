"""Vectors read from the registry, in slabs for FAISS's ``add``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ragserve_index import registry
from ragserve_index.database import Connection
from ragserve_index.structures.base import Floats, Ids

SLAB = 16_384  # vectors read at a time


def slabs(connection: Connection, ns: registry.Namespace, after: int = -1) -> Iterator[tuple[Ids, Floats]]:
    """Yield ids [n], ascending, and vectors [n, dim] float32 that were written after version ``after`` and
    still exist.
    """
    rows = connection.stream(
        # ids grow with versions: the order that the table's index gives is ascending in ids, too
        "SELECT first_id, n, data FROM vectors WHERE namespace_id = ? AND version > ?"
        " ORDER BY version, first_id",
        (ns.id, after),
    )
    ranges: list[tuple[int, int]] = []
    parts: list[Floats] = []
    size = 0
    for first_id, n, data in rows:
        ranges.append((first_id, n))
        parts.append(np.frombuffer(data, dtype="<f4").reshape(n, ns.dim))
        size += n
        if size >= SLAB:
            yield registry.expand(ranges), np.concatenate(parts)
            ranges, parts, size = [], [], 0
    if parts:
        yield registry.expand(ranges), np.concatenate(parts)


def sample(connection: Connection, ns: registry.Namespace, m: int) -> Floats:
    """Return at most ``m`` of the namespace's vectors [<= m, dim]: every stride-th row, deterministic
    for a content.
    """
    stride = max(1, -(-ns.n_chunks // m))
    picked: list[Floats] = []
    seen = 0
    for ids, vectors in slabs(connection, ns):
        picked.append(vectors[-seen % stride :: stride])
        seen += len(ids)
    return np.concatenate(picked) if picked else np.empty((0, ns.dim), dtype=np.float32)
