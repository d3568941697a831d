"""Chunks near others in a document, whose chunks have consecutive ids."""

from __future__ import annotations

from collections.abc import Sequence

from ragserve_index import registry
from ragserve_index.database import Connection
from ragserve_index.types import Chunk
from ragserve_index.viewers import Viewer


def chunks_around(
    connection: Connection, ns: registry.Namespace, chunk_ids: Sequence[int], n: int, viewer: Viewer
) -> dict[int, Chunk]:
    """See :meth:`IndexStore.chunks_around`."""
    wanted = {i: range(i - n, i + n + 1) for i in chunk_ids}
    every = {near for window in wanted.values() for near in window}
    found = registry.chunks_by_id(connection, ns, every, viewer)
    own = {
        near
        for i, window in wanted.items()
        for near in window
        if i in found and near in found and found[near].doc_id == found[i].doc_id
    }
    return {near: found[near] for near in sorted(own)}
