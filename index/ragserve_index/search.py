"""Searching: one cheap look at the registry, FAISS, and the rows of what it found.

The common case is one SELECT of the namespace's version, FAISS, and chunk rows from a cache. It is right without a transaction: the
index is at one committed version, and the rows of a chunk id never change. Only when a row is gone (its document was replaced since)
or the index will not stand still is the search repeated inside a transaction.
"""

from __future__ import annotations

import math
import operator
import sqlite3
from typing import Any

import numpy as np

from ragserve_index import registry
from ragserve_index.caches import ChunkCache, SelectionCache
from ragserve_index.database import Database
from ragserve_index.errors import InvalidRequest, NotFound
from ragserve_index.filters import AnyFilter, compile_filter
from ragserve_index.indexes import Indexes
from ragserve_index.live import Behind, LiveIndex
from ragserve_index.structures import Floats, Ids, Selection
from ragserve_index.types import Chunk, Hit, SearchResult

MAX_K = 10_000
_TRIES = 4  # without a transaction, before one is used; only a writer that commits between any two steps makes them fail

Scored = tuple[Floats, Ids, int]


class Searcher:
    """Thread-safe."""

    def __init__(self, database: Database, indexes: Indexes) -> None:
        self._database = database
        self._indexes = indexes
        self._chunks = ChunkCache()
        self._selections = SelectionCache()

    def search(self, namespace: str, queries: np.ndarray, k: int, filter: AnyFilter | None) -> SearchResult:
        """See :meth:`IndexStore.search`."""
        cached = self._chunks.get
        for _ in range(_TRIES):
            scores, ids, version = self.search_ids(namespace, queries, k, filter)
            rows = ids.tolist()
            chunks = [[cached(i) for i in row] for row in rows]
            if any(None in row for row in chunks):
                with self._database.read() as connection:
                    if not self._fetch(connection, namespace, rows, chunks):
                        continue  # a chunk went away since: search the newer version
            return _result(scores, chunks, version)
        condition = _compile(filter)
        live = self._locate_again(namespace)
        with live.updating, self._database.read() as connection:
            scores, ids, version = self._search_pinned(connection, live, _checked(queries, live.dim), _checked_k(k), filter, condition)
            rows = ids.tolist()
            chunks = [[cached(i) for i in row] for row in rows]
            if not self._fetch(connection, namespace, rows, chunks):
                raise NotFound(f"Namespace {namespace!r} was dropped during the search.", code="namespace_not_found")
        return _result(scores, chunks, version)

    def _fetch(self, connection: sqlite3.Connection, namespace: str, rows: list[list[int]], chunks: list[list[Chunk | None]]) -> bool:
        """Fill the gaps in ``chunks`` from the registry. False when a row is not there any more."""
        wanted = {
            i for row, known in zip(rows, chunks, strict=True) for i, chunk in zip(row, known, strict=True) if chunk is None and i >= 0
        }
        found: dict[int, Chunk] = {}
        if wanted:
            found = registry.chunks_by_id(connection, registry.namespace(connection, namespace), wanted)
            if len(found) < len(wanted):
                return False
            self._chunks.add(found.values())
        for row, known in zip(rows, chunks, strict=True):
            known[:] = [chunk if chunk is not None else found.get(i) for i, chunk in zip(row, known, strict=True)]
        return True

    def search_ids(self, namespace: str, queries: np.ndarray, k: int, filter: AnyFilter | None) -> Scored:
        """See :meth:`IndexStore.search_ids`."""
        k = _checked_k(k)
        condition = _compile(filter)
        for _ in range(_TRIES):
            live, version, selection = self._prepare(namespace, filter, condition)
            checked = _checked(queries, live.dim)
            try:
                return live.search(checked, k, version, selection)
            except Behind:
                live.catch_up()
                self._indexes.after_search(live)
        with live.updating, self._database.read() as connection:
            return self._search_pinned(connection, live, checked, k, filter, condition)

    def _search_pinned(
        self, connection: sqlite3.Connection, live: LiveIndex, queries: Floats, k: int, filter: AnyFilter | None, condition: Any
    ) -> Scored:
        """Search at the version of a transaction; the caller holds ``live.updating`` from before it began, so the index stays there."""
        ns = live.follow(connection)
        selection = None if filter is None else self._select(connection, ns.id, ns.version, filter, condition)
        return live.search(queries, k, ns.version, selection)

    def _prepare(self, namespace: str, filter: AnyFilter | None, condition: Any) -> tuple[LiveIndex, int, Selection | None]:
        """The index, the registry's version now, and what the filter selects in it."""
        database = self._database
        connection = database.acquire()
        try:
            row = connection.execute("SELECT id, version FROM namespaces WHERE name = ?", (namespace,)).fetchone()
            if row is None:
                raise registry.namespace_not_found(namespace)
            namespace_id, version = row
            selection = None
            if filter is not None:
                connection.execute("BEGIN")
                found = registry.namespace_by_id(connection, namespace_id)
                if found is None:
                    raise registry.namespace_not_found(namespace)
                version = found.version
                selection = self._select(connection, namespace_id, version, filter, condition)
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise database.failure(error) from error
        finally:
            database.release(connection)
        return self._indexes.get(namespace_id) or self._locate_again(namespace), version, selection

    def _locate_again(self, namespace: str) -> LiveIndex:
        with self._database.read() as connection:
            return self._indexes.of(registry.namespace(connection, namespace))

    def _select(self, connection: sqlite3.Connection, namespace_id: int, version: int, filter: AnyFilter, condition: Any) -> Selection:
        key = (namespace_id, version, filter.model_dump_json())
        selection = self._selections.get(key)
        if selection is None:
            selection = Selection(registry.selected_ids(connection, namespace_id, condition))
            self._selections.add(key, selection)
        return selection


def _compile(filter: AnyFilter | None) -> tuple[str, list[Any]] | None:
    return None if filter is None else compile_filter(filter)


def _checked_k(k: int) -> int:
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= operator.index(k) <= MAX_K:
        raise InvalidRequest(f"k must be a whole number from 1 to {MAX_K:,}, not {k!r}.", code="invalid_k", param="k")
    return operator.index(k)


def _checked(queries: np.ndarray, dim: int) -> Floats:
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InvalidRequest(f"Query vectors of shape {list(queries.shape)}, expected [n, {dim}].", code="invalid_vectors", param="queries")
    checked = np.ascontiguousarray(queries, dtype=np.float32)
    if not math.isfinite(np.vdot(checked, checked)):  # one pass that makes no array: a NaN or an infinity comes out at the end
        raise InvalidRequest("Query vectors must be finite.", code="invalid_vectors", param="queries")
    return checked


def _result(scores: Floats, chunks: list[list[Any]], version: int) -> SearchResult:
    hits = []
    for row, values in zip(chunks, scores.tolist(), strict=True):
        if None in row:  # fewer than k
            row = [chunk for chunk in row if chunk is not None]
        hits.append(list(map(Hit, row, values)))
    return SearchResult(hits, version)
