"""Searching: find the namespace's version, search FAISS, read the rows of what it found.

The common case needs no transaction around all three: the index is at one committed version, and the rows of
a chunk id never change. Only when a row is gone (its document was replaced meanwhile) or the index keeps
moving is the search repeated inside a transaction."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from ragserve.errors import InvalidRequest, NotFound
from ragserve_index import lexical_search, registry
from ragserve_index.database import Connection, Database
from ragserve_index.errors import RegistryDamaged, lexical_index_damaged
from ragserve_index.filters import AnyFilter, compile_filter
from ragserve_index.fusion import DEPTH, Ranked, by_mean_score, by_standard_scores
from ragserve_index.index.namespace_index import Behind, NamespaceIndex
from ragserve_index.index.pool import IndexPool
from ragserve_index.lexical_indexes import LexicalIndexes
from ragserve_index.seen_words import SeenChunks, SeenWords
from ragserve_index.selection_cache import SelectionCache, SightCache
from ragserve_index.structures.base import Floats, Ids, IdSelection
from ragserve_index.types import Hit, NamespaceInfo, SearchResult
from ragserve_index.viewers import Viewer
from ragserve_index.visible import Condition, both

MAX_K = 10_000
# Seconds after which the registry is asked whatever the mark says. Bounds the harm if its file is deleted.
RECHECK_S = 0.25
_MAX_LOCATED = 4_096  # namespaces
# Attempts without a transaction. One fails only if a writer commits between two of its steps.
_TRIES = 4

Scored = tuple[Floats, Ids, int]


@dataclass(frozen=True, slots=True)
class Among:
    """The documents that are searched: those of ``viewer`` that meet the filter's condition."""

    condition: Condition | None
    viewer: Viewer


class Searcher:
    """Thread-safe."""

    def __init__(self, database: Database, pool: IndexPool, lexical: LexicalIndexes) -> None:
        self._database = database
        self._pool = pool
        self._lexical = lexical
        self._selections = SelectionCache()
        self._sights = SightCache()
        self._seen_words = SeenWords()
        self._counts = lexical_search.WordCounts()
        # namespace -> (commit mark, time of the check, index, version): right while the mark is the same
        self._located: dict[str, tuple[int, float, NamespaceIndex, int]] = {}

    def forget(self, namespace_id: int) -> None:
        """Let go of the indexes of a namespace that is gone: they take memory, also on a GPU, and disk."""
        for name, (_, _, index, _) in list(self._located.items()):
            if index.namespace_id == namespace_id:
                self._located.pop(name, None)
        self._pool.forget(namespace_id)
        self._lexical.remove(namespace_id)

    def forget_dropped(self, on_disk: set[int]) -> None:
        """See :meth:`IndexStore.forget_dropped`. ``on_disk``: ids of the namespaces that have files."""
        held = on_disk | self._pool.held() | self._lexical.held()  # before the look at those there are
        with self._database.read() as connection:
            there = {ns.id for ns in registry.namespaces(connection)}
        for namespace_id in held - there:
            self.forget(namespace_id)

    def search(
        self, namespace: str, queries: np.ndarray, k: int, filter: AnyFilter | None, viewer: Viewer
    ) -> SearchResult:
        """See :meth:`IndexStore.search`."""
        for _ in range(_TRIES):
            scores, ids, version = self.search_ids(namespace, queries, k, filter, viewer)
            with self._database.read() as connection:
                hits = _hits(connection, namespace, scores, ids, viewer)
            if hits is not None:
                return SearchResult(hits, version)
        with self._database.read() as connection:
            index = self._pool.of(registry.namespace(connection, namespace))
        with index.updating, self._database.read() as connection:
            scores, ids, version = self._search_pinned(
                connection,
                index,
                checked_queries(queries, index.dim),
                checked_k(k),
                self._among(filter, viewer),
            )
            hits = _hits(connection, namespace, scores, ids, viewer)
        if hits is None:
            raise NotFound(
                f"Namespace {namespace!r} was dropped during the search.", code="namespace_not_found"
            )
        return SearchResult(hits, version)

    def search_ids(
        self, namespace: str, queries: np.ndarray, k: int, filter: AnyFilter | None, viewer: Viewer
    ) -> Scored:
        """See :meth:`IndexStore.search_ids`."""
        k = checked_k(k)
        among = self._among(filter, viewer)
        for _ in range(_TRIES):
            index, version, selection = self._locate(namespace, among)
            checked = checked_queries(queries, index.dim)
            try:
                return index.search(checked, k, version, selection)
            except Behind:
                index.catch_up()
                self._pool.after_search(index)
        with index.updating, self._database.read() as connection:
            return self._search_pinned(connection, index, checked, k, among)

    def search_text(
        self,
        namespace: str,
        texts: Sequence[str],
        k: int,
        filter: AnyFilter | None,
        vector: np.ndarray | None,
        viewer: Viewer,
    ) -> SearchResult:
        """See :meth:`IndexStore.search_text`; ``texts`` are the text and its variants.

        The lexical index is read at the version of a transaction, so the dense search is repeated until it
        is of that version, and at last made inside the transaction."""
        with self._not_found_if_dropped(namespace):
            return self._search_text(namespace, texts, k, filter, vector, viewer)

    def _search_text(
        self,
        namespace: str,
        texts: Sequence[str],
        k: int,
        filter: AnyFilter | None,
        vector: np.ndarray | None,
        viewer: Viewer,
    ) -> SearchResult:
        k, among = checked_k(k), self._among(filter, viewer)
        depth = max(k, DEPTH)
        queries = None if vector is None else np.atleast_2d(vector)
        dense: Scored | None = None
        for _ in range(_TRIES):
            if queries is not None:
                dense = self.search_ids(namespace, queries, depth, filter, viewer)
            with self._database.read() as connection:
                ns = registry.namespace(connection, namespace)
                if dense is None or dense[2] == ns.version:
                    with suppress(Behind):
                        return self._fused(connection, ns, texts, k, among, queries, dense)
        with self._database.read() as connection:
            index = self._pool.of(registry.namespace(connection, namespace))
        with index.updating, self._database.read() as connection:
            ns = registry.namespace(connection, namespace)
            if queries is not None:
                vectors = checked_queries(queries, index.dim)
                dense = self._search_pinned(connection, index, vectors, depth, among)
            return self._fused(connection, ns, texts, k, among, queries, dense)

    def word_counts(self, namespace: str, words: Sequence[str], viewer: Viewer) -> dict[str, int]:
        """See :meth:`IndexStore.word_counts`."""
        with self._not_found_if_dropped(namespace), self._database.read() as connection:
            ns = registry.namespace(connection, namespace)
            seen = self._seen(connection, ns, viewer)
            if seen is None:
                return lexical_search.word_counts(words, partial(self._counts.of, connection, ns))
            return lexical_search.word_counts(words, partial(self._seen_words.of, connection, seen))

    @contextmanager
    def _not_found_if_dropped(self, namespace: str) -> Iterator[None]:
        """Raise NotFound instead of RegistryDamaged if the namespace was dropped meanwhile: in Postgres its
        lexical table is gone at once, also for transactions that began before."""
        try:
            yield
        except RegistryDamaged:
            with self._database.read() as connection:
                registry.namespace(connection, namespace)
            raise

    def _fused(
        self,
        connection: Connection,
        ns: registry.Namespace,
        texts: Sequence[str],
        k: int,
        among: Among,
        queries: np.ndarray | None,
        dense: Scored | None,
    ) -> SearchResult:
        """Search by words in this transaction, fuse with the dense search of the same version, read the rows.
        Raises Behind if the index has moved on since."""
        selection = self._select(connection, ns, among)
        depth = k if dense is None and len(texts) == 1 else max(k, DEPTH)
        seen = self._seen(connection, ns, among.viewer)
        depth = depth if seen is None else max(k, DEPTH)
        rankings = [self._by_words(connection, ns, text, depth, selection) for text in texts]
        if seen is not None:
            rankings = [
                seen.scored(connection, text, found, self._seen_words)
                for text, found in zip(texts, rankings, strict=True)
            ]
        found = by_mean_score(rankings)[:depth]
        if dense is None or queries is None:
            ranked = [Ranked(chunk, score, None, score) for chunk, score in found[:k]]
        else:
            scores, ids, _ = dense
            cosines = {i: s for i, s in zip(ids[0].tolist(), scores[0].tolist(), strict=True) if i >= 0}
            by_words = [i for i, _ in found if i not in cosines]
            cosines.update(self._cosines(ns, queries[0], by_words))
            ranked = by_standard_scores(cosines, dict(found))[:k]
        rows = registry.chunks_by_id(connection, ns, [one.chunk_id for one in ranked], among.viewer)
        if len(rows) < len(ranked):
            raise lexical_index_damaged(self._database.name, "it has a chunk that is gone")
        hits = [Hit(rows[one.chunk_id], one.score, one.cosine, one.bm25) for one in ranked]
        return SearchResult([hits], ns.version)

    def _seen(self, connection: Connection, ns: registry.Namespace, viewer: Viewer) -> SeenChunks | None:
        """What a viewer sees of a namespace; None if that is all."""
        selection = self._select(connection, ns, Among(None, viewer))
        if selection is None:
            return None
        return SeenChunks(ns, viewer, self._sights.info(connection, ns, viewer), selection)

    def _by_words(
        self,
        connection: Connection,
        ns: registry.Namespace,
        text: str,
        k: int,
        selection: IdSelection | None,
        counts: lexical_search.WordCounts | None = None,
    ) -> lexical_search.Scored:
        found = self._lexical.search(connection, ns, text, k, selection)
        if found is None:
            found = lexical_search.search(connection, ns, text, k, selection, counts or self._counts)
        return found

    def _cosines(self, ns: registry.Namespace, query: np.ndarray, ids: list[int]) -> dict[int, float]:
        """Cosines of chunks that only the lexical search found."""
        if not ids:
            return {}
        try:
            own = self._pool.of(ns).cosines(query, np.array(ids, dtype=np.int64), ns.version)
        except RuntimeError as error:  # FAISS does not have one of them
            raise lexical_index_damaged(self._database.name, "it has a chunk that is gone") from error
        return dict(zip(ids, own.tolist(), strict=True))

    def _search_pinned(
        self,
        connection: Connection,
        index: NamespaceIndex,
        queries: Floats,
        k: int,
        among: Among,
    ) -> Scored:
        """Search at the version of a transaction. The caller holds ``index.updating`` from before it began,
        so the index stays at that version.
        """
        ns = index.follow(connection)
        selection = self._select(connection, ns, among)
        return index.search(queries, k, ns.version, selection)

    def _locate(self, namespace: str, among: Among) -> tuple[NamespaceIndex, int, IdSelection | None]:
        """The namespace's index, its newest version, and what is searched in that version; None: all."""
        mark = self._database.mark
        located = self._located.get(namespace)
        if located is None or not mark.is_still(located[0]) or time.monotonic() - located[1] > RECHECK_S:
            seen = mark.settled()  # before the registry is read: a commit in between changes it
            now = time.monotonic()
            with self._database.read() as connection:
                ns = registry.namespace(connection, namespace)
            index, version = self._pool.of(ns), ns.version
            if seen is not None:
                if len(self._located) >= _MAX_LOCATED:
                    self._located.clear()
                self._located[namespace] = (seen, now, index, version)
        else:
            _, _, index, version = located
        sight = self._sights.known(index.namespace_id, version, among.viewer)
        if sight is not None:
            condition = both(among.condition, sight[0])
            if condition is None:
                return index, version, None
            selection = self._selections.get((index.namespace_id, version, repr(condition)))
            if selection is not None:
                return index, version, selection
        with self._database.read() as connection:
            ns = registry.namespace(connection, namespace)
            return self._pool.of(ns), ns.version, self._select(connection, ns, among)

    def _among(self, filter: AnyFilter | None, viewer: Viewer) -> Among:
        dialect = self._database.dialect
        return Among(None if filter is None else compile_filter(filter, dialect), viewer)

    def info(self, connection: Connection, ns: registry.Namespace, viewer: Viewer) -> NamespaceInfo:
        """The namespace with the numbers of the documents that a viewer sees."""
        return self._sights.info(connection, ns, viewer)

    def hides(self, namespace: str, viewer: Viewer) -> bool:
        """See :meth:`IndexStore.hides`."""
        if viewer.labels is None:
            return False
        with self._database.read() as connection:
            ns = registry.find_namespace(connection, namespace)
            return ns is None or self._sights.of(connection, ns, viewer) is not None

    def _select(self, connection: Connection, ns: registry.Namespace, among: Among) -> IdSelection | None:
        condition = both(among.condition, self._sights.of(connection, ns, among.viewer))
        if condition is None:
            return None
        key = (ns.id, ns.version, repr(condition))
        selection = self._selections.get(key)
        if selection is None:
            selection = IdSelection(registry.selected_ids(connection, ns.id, condition))
            self._selections.add(key, selection)
        return selection


def _hits(
    connection: Connection, namespace: str, scores: Floats, ids: Ids, viewer: Viewer
) -> list[list[Hit]] | None:
    """The rows of ids [n, k] (-1: no result) with their scores; None when a row is gone, or seen no
    more."""
    wanted = {i for row in ids.tolist() for i in row if i >= 0}
    ns = registry.find_namespace(connection, namespace)
    found = {} if ns is None or not wanted else registry.chunks_by_id(connection, ns, wanted, viewer)
    if len(found) < len(wanted):
        return None
    return [
        [Hit(found[i], score, cosine=score) for i, score in zip(row, values, strict=True) if i >= 0]
        for row, values in zip(ids.tolist(), scores.tolist(), strict=True)
    ]


def checked_k(k: int) -> int:
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= operator.index(k) <= MAX_K:
        raise InvalidRequest(
            f"k must be a whole number from 1 to {MAX_K:,}, not {k!r}.", code="invalid_k", param="k"
        )
    return operator.index(k)


def checked_queries(queries: np.ndarray, dim: int) -> Floats:
    """Queries as contiguous float32. Values that are not finite are refused by ``NamespaceIndex.search``."""
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InvalidRequest(
            f"Query vectors of shape {list(queries.shape)}, expected [n, {dim}].",
            code="invalid_vectors",
            param="queries",
        )
    return np.ascontiguousarray(queries, dtype=np.float32)
