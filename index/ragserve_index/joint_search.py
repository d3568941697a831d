"""Searching several namespaces as one.

Cosines are the same number in every namespace, so dense searches are merged by them. BM25 is not, and is
computed anew over all of them together (`bm25`)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from ragserve_index import lexical_indexes, lexical_search, registry
from ragserve_index.bm25 import PartCandidates, joint_scores, large_weight, weight
from ragserve_index.database import Connection
from ragserve_index.errors import lexical_index_damaged
from ragserve_index.filters import MAX_S, AnyFilter, filter_too_costly
from ragserve_index.fusion import DEPTH, Ranked, by_mean_score, by_standard_scores
from ragserve_index.index.namespace_index import Behind
from ragserve_index.search import Among, Scored, Searcher, checked_k, checked_queries
from ragserve_index.seen_words import SeenChunks, score
from ragserve_index.types import Chunk, Hit, JointResult
from ragserve_index.viewers import EVERYTHING, Viewer
from ragserve_index.word_cutting import distinct_words

_TRIES = 4


class JointSearcher(Searcher):
    """A `Searcher` of several namespaces, too. Thread-safe."""

    def search_several(
        self,
        namespaces: Sequence[str],
        texts: Sequence[str],
        k: int,
        filter: AnyFilter | None,
        vector: np.ndarray | None,
        viewer: Viewer,
    ) -> JointResult:
        """See :meth:`IndexStore.search_several`; ``texts`` are the text and its variants.

        One transaction reads all namespaces. The dense searches are repeated until each is at its version of
        the namespace, and at last made inside it, as in `search_text`."""
        k, among = checked_k(k), self._among(filter, viewer)
        depth = max(k, DEPTH) if texts else k
        queries = None if vector is None else np.atleast_2d(vector)
        self._select_in_time(namespaces, among)
        dense: dict[str, Scored] = {}
        for _ in range(_TRIES):
            if queries is not None:
                dense = {name: self.search_ids(name, queries, depth, filter, viewer) for name in namespaces}
            with self._not_found_if_any_dropped(namespaces), self._database.read() as connection:
                spaces = [registry.namespace(connection, name) for name in namespaces]
                if all(not dense or dense[ns.name][2] == ns.version for ns in spaces):
                    with suppress(Behind):
                        return self._joined(connection, spaces, texts, k, among, queries, dense)
        with self._database.read() as connection:
            indexes = [self._pool.of(registry.namespace(connection, name)) for name in namespaces]
        with self._not_found_if_any_dropped(namespaces), ExitStack() as stack:
            for index in sorted(indexes, key=lambda one: one.namespace_id):  # all threads in one order
                stack.enter_context(index.updating)
            connection = stack.enter_context(self._database.read())
            if queries is not None:
                for index in indexes:
                    vectors = checked_queries(queries, index.dim)
                    dense[index.name] = self._search_pinned(connection, index, vectors, depth, among)
            spaces = [registry.namespace(connection, name) for name in namespaces]
            return self._joined(connection, spaces, texts, k, among, queries, dense)

    def _select_in_time(self, namespaces: Sequence[str], among: Among) -> None:
        """Let the cache of selections have what a filter selects. Raises InvalidRequest where all namespaces
        together take it longer than one may."""
        began = time.monotonic()
        for name in namespaces if among.condition is not None else ():
            self._locate(name, among)
            if time.monotonic() - began > MAX_S:
                raise filter_too_costly()

    def _joined(
        self,
        connection: Connection,
        spaces: Sequence[registry.Namespace],
        texts: Sequence[str],
        k: int,
        among: Among,
        queries: np.ndarray | None,
        dense: Mapping[str, Scored],
    ) -> JointResult:
        """Order what all namespaces have, at the versions of this transaction, and read the rows. The ids of
        chunks are unique in a registry. Raises Behind if an index has moved on since."""
        depth = max(k, DEPTH)
        cosines: dict[int, float] = {}
        home: dict[int, registry.Namespace] = {}
        for ns in spaces if dense else ():
            scores, ids, _ = dense[ns.name]
            own = {i: s for i, s in zip(ids[0].tolist(), scores[0].tolist(), strict=True) if i >= 0}
            cosines |= own
            home |= dict.fromkeys(own, ns)
        cosines = dict(_best(cosines, depth))
        sights = [self._seen(connection, ns, among.viewer) for ns in spaces]
        if texts:
            selections = [self._select(connection, ns, among) for ns in spaces]
            counts = lexical_search.ReadCounts(self._counts)
            rankings = []
            for text in texts:
                found = [  # the best of each, by its own statistics
                    [chunk for chunk, _ in self._by_words(connection, ns, text, depth, selection, counts)]
                    for ns, selection in zip(spaces, selections, strict=True)
                ]
                home |= {chunk: ns for ns, chunks in zip(spaces, found, strict=True) for chunk in chunks}
                if any(sights):
                    scored = self._seen_bm25(connection, spaces, sights, text, found)
                else:
                    scored = self._joint_bm25(connection, spaces, text, found, counts)
                rankings.append(_best(scored, depth))
            lexical = by_mean_score(rankings)[:depth]
            if queries is None:
                ranked = [Ranked(chunk, score, None, score) for chunk, score in lexical[:k]]
            else:
                for ns in spaces:
                    by_words = [i for i, _ in lexical if home[i] is ns and i not in cosines]
                    cosines.update(self._cosines(ns, queries[0], by_words))
                ranked = by_standard_scores(cosines, dict(lexical))[:k]
        else:
            ranked = [Ranked(chunk, score, score, None) for chunk, score in _best(cosines, k)]
        rows: dict[int, Chunk] = {}
        for ns in spaces:
            if own_ids := [one.chunk_id for one in ranked if home[one.chunk_id] is ns]:
                rows |= registry.chunks_by_id(connection, ns, own_ids, among.viewer)
        if len(rows) < len(ranked):
            raise lexical_index_damaged(self._database.name, "it has a chunk that is gone")
        hits = [Hit(rows[one.chunk_id], one.score, one.cosine, one.bm25) for one in ranked]
        return JointResult(hits, {ns.name: ns.version for ns in spaces})

    def _joint_bm25(
        self,
        connection: Connection,
        spaces: Sequence[registry.Namespace],
        text: str,
        found: Sequence[Sequence[int]],
        counts: lexical_search.WordCounts,
    ) -> dict[int, float]:
        """BM25 of the chunks ``found`` in each namespace, with the statistics of all. Words in half of the
        chunks or more add nothing where others tell."""
        tables = connection.dialect.lexical
        n_chunks = sum(ns.n_chunks for ns in spaces)
        counted = sorted(
            (n, word)
            for word in distinct_words(text, lexical_search.MAX_WORDS)
            if (n := sum(counts.of(connection, ns, word) for ns in spaces))
        )[: lexical_search.MAX_TERMS]
        telling = [(n, word) for n, word in counted if 2 * n < n_chunks] or counted
        wanted = [word for _, word in telling]
        n_words = [tables.n_words(connection, ns.id) for ns in spaces]
        parts: list[PartCandidates] = []
        for ns, size, ids in zip(spaces, n_words, found, strict=True):
            scores = self._lexical.word_scores(ns, wanted, ids)
            if scores is None:
                scores = lexical_search.word_scores(connection, ns, wanted, ids, counts)
            lengths = tables.lengths(connection, ns.id, json.dumps(list(ids)))
            parts.append(PartCandidates(lengths, size / max(1, ns.n_chunks), scores))
        weigh = large_weight if n_chunks >= lexical_indexes.FROM else weight  # as one namespace of all
        weights = [weigh(n_chunks, n) for n, _ in telling]
        return joint_scores(parts, weights, sum(n_words) / max(1, n_chunks))

    def _seen_bm25(
        self,
        connection: Connection,
        spaces: Sequence[registry.Namespace],
        sights: Sequence[SeenChunks | None],
        text: str,
        found: Sequence[Sequence[int]],
    ) -> dict[int, float]:
        """The same by what a viewer sees alone, who does not see all: as `seen_words`."""
        infos = [ns if sight is None else sight.info for ns, sight in zip(spaces, sights, strict=True)]
        n_chunks = sum(info.n_chunks for info in infos)
        mean = sum(info.n_tokens for info in infos) / max(1, n_chunks)
        weights: dict[str, float] = {}
        for word in distinct_words(text, lexical_search.MAX_WORDS):
            n = sum(
                self._counts.of(connection, ns, word)
                if sight is None
                else self._seen_words.of(connection, sight, word)
                for ns, sight in zip(spaces, sights, strict=True)
            )
            weights |= {word: weight(n_chunks, n)} if n else {}
        scored: dict[int, float] = {}
        for ns, sight, ids in zip(spaces, sights, found, strict=True):
            viewer = EVERYTHING if sight is None else sight.viewer
            for chunk in registry.chunks_by_id(connection, ns, ids, viewer).values():
                if own := score(chunk, weights, mean):
                    scored[chunk.chunk_id] = own
        return scored

    @contextmanager
    def _not_found_if_any_dropped(self, namespaces: Sequence[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for name in namespaces:
                stack.enter_context(self._not_found_if_dropped(name))
            yield


def _best(scores: Mapping[int, float], n: int) -> list[tuple[int, float]]:
    """The n highest, best first."""
    return sorted(scores.items(), key=lambda one: (-one[1], one[0]))[:n]
