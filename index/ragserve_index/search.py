"""Searching: one cheap look at the registry, FAISS, and the rows of what it found.

The common case is a look at the commit mark, FAISS, and chunk rows from a cache. It is right without a
transaction: the index is at one committed version, and the rows of a chunk id never change. Only when a row
is gone (its document was replaced since) or the index will not stand still is the search repeated inside a
transaction."""

from __future__ import annotations

import operator
import sqlite3
import time
from typing import Any

import numpy as np

from ragserve_index import registry
from ragserve_index.caches import ChunkCache, SelectionCache
from ragserve_index.database import Database
from ragserve_index.errors import InvalidRequest, NotFound
from ragserve_index.filters import AnyFilter, compile_filter
from ragserve_index.indexes import Indexes
from ragserve_index.live import Behind, LiveIndex
from ragserve_index.structures import Floats, Ids, IdSelection
from ragserve_index.types import Chunk, Hit, SearchResult

MAX_K = 10_000
# seconds after which the registry is asked whatever the mark says: should someone delete its file, this
# bounds the harm
RECHECK_S = 0.25
_MAX_KNOWN = 4_096  # namespaces
# without a transaction, before one is used; only a writer that commits between any two steps makes them fail
_TRIES = 4

Scored = tuple[Floats, Ids, int]


class Searcher:
    """Thread-safe."""

    def __init__(self, database: Database, indexes: Indexes) -> None:
        self._database = database
        self._indexes = indexes
        self._chunks = ChunkCache()
        self._selections = SelectionCache()
        # namespace -> commit mark, when it was checked, index, version: right as long as the mark is the same
        self._known: dict[str, tuple[int, float, LiveIndex, int]] = {}

    def search(self, namespace: str, queries: np.ndarray, k: int, filter: AnyFilter | None) -> SearchResult:
        """See :meth:`IndexStore.search`."""
        cached = self._chunks.get
        for _ in range(_TRIES):
            scores, ids, version = self.search_ids(namespace, queries, k, filter)
            rows = ids.tolist()
            chunks = [list(map(cached, row)) for row in rows]
            if not all(
                map(all, chunks)
            ):  # None is the only false one; `None in row` would call each row's __eq__
                with self._database.read() as connection:
                    if not self._fetch(connection, namespace, rows, chunks):
                        continue  # a chunk went away since: search the newer version
            return _result(scores, chunks, version)
        condition = _compile(filter)
        live = self._locate_again(namespace)
        with live.updating, self._database.read() as connection:
            scores, ids, version = self._search_pinned(
                connection, live, _checked(queries, live.dim), _checked_k(k), filter, condition
            )
            rows = ids.tolist()
            chunks = [list(map(cached, row)) for row in rows]
            if not self._fetch(connection, namespace, rows, chunks):
                raise NotFound(
                    f"Namespace {namespace!r} was dropped during the search.", code="namespace_not_found"
                )
        return _result(scores, chunks, version)

    def _fetch(
        self,
        connection: sqlite3.Connection,
        namespace: str,
        rows: list[list[int]],
        chunks: list[list[Chunk | None]],
    ) -> bool:
        """Fill the gaps in ``chunks`` from the registry. False when a row is not there any more."""
        wanted = {
            i
            for row, known in zip(rows, chunks, strict=True)
            for i, chunk in zip(row, known, strict=True)
            if chunk is None and i >= 0
        }
        found: dict[int, Chunk] = {}
        if wanted:
            found = registry.chunks_by_id(connection, registry.namespace(connection, namespace), wanted)
            if len(found) < len(wanted):
                return False
            self._chunks.add(found.values())
        for row, known in zip(rows, chunks, strict=True):
            known[:] = [
                chunk if chunk is not None else found.get(i) for i, chunk in zip(row, known, strict=True)
            ]
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
        self,
        connection: sqlite3.Connection,
        live: LiveIndex,
        queries: Floats,
        k: int,
        filter: AnyFilter | None,
        condition: Any,
    ) -> Scored:
        """Search at the version of a transaction; the caller holds ``live.updating`` from before it began, so
        the index stays there.
        """
        ns = live.follow(connection)
        selection = None if filter is None else self._select(connection, ns.id, ns.version, filter, condition)
        return live.search(queries, k, ns.version, selection)

    def _prepare(
        self, namespace: str, filter: AnyFilter | None, condition: Any
    ) -> tuple[LiveIndex, int, IdSelection | None]:
        """The index, the registry's version now, and what the filter selects in it."""
        known = self._known.get(namespace)
        mark = self._database.mark
        if known is None or not mark.is_still(known[0]) or time.monotonic() - known[1] > RECHECK_S:
            seen = mark.settled()  # before the registry is read: a commit in between changes it
            now = time.monotonic()
            with self._database.read() as connection:
                ns = registry.namespace(connection, namespace)
            live, version = self._indexes.of(ns), ns.version
            if seen is not None:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[namespace] = (seen, now, live, version)
        else:
            _, _, live, version = known
        if filter is None:
            return live, version, None
        selection = self._selections.get((live.namespace_id, version, filter.model_dump_json()))
        if selection is None:
            with self._database.read() as connection:
                ns = registry.namespace(connection, namespace)
                selection = self._select(connection, ns.id, ns.version, filter, condition)
                live, version = self._indexes.of(ns), ns.version
        return live, version, selection

    def _locate_again(self, namespace: str) -> LiveIndex:
        with self._database.read() as connection:
            return self._indexes.of(registry.namespace(connection, namespace))

    def _select(
        self,
        connection: sqlite3.Connection,
        namespace_id: int,
        version: int,
        filter: AnyFilter,
        condition: Any,
    ) -> IdSelection:
        key = (namespace_id, version, filter.model_dump_json())
        selection = self._selections.get(key)
        if selection is None:
            selection = IdSelection(registry.selected_ids(connection, namespace_id, condition))
            self._selections.add(key, selection)
        return selection


def _compile(filter: AnyFilter | None) -> tuple[str, list[Any]] | None:
    return None if filter is None else compile_filter(filter)


def _checked_k(k: int) -> int:
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= operator.index(k) <= MAX_K:
        raise InvalidRequest(
            f"k must be a whole number from 1 to {MAX_K:,}, not {k!r}.", code="invalid_k", param="k"
        )
    return operator.index(k)


def _checked(queries: np.ndarray, dim: int) -> Floats:
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InvalidRequest(
            f"Query vectors of shape {list(queries.shape)}, expected [n, {dim}].",
            code="invalid_vectors",
            param="queries",
        )
    return np.ascontiguousarray(
        queries, dtype=np.float32
    )  # that they are finite shows in the scores: see LiveIndex.search


def _result(scores: Floats, chunks: list[list[Any]], version: int) -> SearchResult:
    hits = []
    for row, values in zip(chunks, scores.tolist(), strict=True):
        if not all(row):  # fewer than k
            row = [chunk for chunk in row if chunk is not None]
        hits.append(list(map(Hit, row, values)))
    return SearchResult(hits, version)
