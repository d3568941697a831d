"""BM25 over a namespace's words in the registry.

Neither FTS5 nor Postgres prunes to the top k: they score each chunk that has one of the words. That is quick
in small namespaces. Large ones are searched by their index of tantivy (`lexical_indexes`), and here only
until they have it, for the rarest words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ragserve_index import registry
from ragserve_index.bm25 import WordScores, weight
from ragserve_index.database import Connection
from ragserve_index.structures.base import IdSelection
from ragserve_index.word_cutting import distinct_words

MATCHES = 65_536  # of the words that are scored, the rarest first
MAX_WORDS = 256  # read of a query
MAX_TERMS = 64  # used of them, the rarest
_LISTED = 4_096  # chunks of a filter up to which the database receives their ids
_COUNTED = 512  # chunks from which on a word's count is kept
_MAX_COUNTS = 65_536
_DRIFT = 0.1  # change of a namespace's size from which on its words are counted again

Scored = list[tuple[int, float]]
"""Chunk ids and BM25 scores, best first."""


class WordCounts:
    """Numbers of chunks that have a word, kept for frequent words, which take long to count. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], tuple[int, int]] = {}

    def of(self, connection: Connection, ns: registry.Namespace, word: str) -> int:
        """The number of chunks with the word, as it was when the namespace had about as many chunks."""
        known = self._counts.get((ns.id, word))
        if known is not None and abs(known[0] - ns.n_chunks) <= _DRIFT * ns.n_chunks:
            return known[1]
        count = connection.dialect.lexical.count(connection, ns.id, word)
        if count > _COUNTED:
            if len(self._counts) >= _MAX_COUNTS:
                self._counts.clear()
            self._counts[ns.id, word] = ns.n_chunks, count
        return count


class ReadCounts(WordCounts):
    """The same for one transaction, in which no word is counted twice."""

    def __init__(self, kept: WordCounts) -> None:
        self._kept = kept
        self._read: dict[tuple[int, str], int] = {}

    def of(self, connection: Connection, ns: registry.Namespace, word: str) -> int:
        found = self._read.get((ns.id, word))
        if found is None:
            found = self._read[ns.id, word] = self._kept.of(connection, ns, word)
        return found


def word_counts(given: Sequence[str], count: Callable[[str], int]) -> dict[str, int]:
    """The number of chunks that each word is in, by ``count``; of a text of several words, the rarest."""
    return {text: min(map(count, distinct_words(text, MAX_WORDS)), default=0) for text in given}


def search(
    connection: Connection,
    ns: registry.Namespace,
    text: str,
    k: int,
    selection: IdSelection | None,
    counts: WordCounts,
) -> Scored:
    """The k best chunks (of the selection) that share a word with the text; fewer if fewer do."""
    wanted = distinct_words(text, MAX_WORDS)
    counted = sorted((n, word) for word in wanted if (n := counts.of(connection, ns, word)))[:MAX_TERMS]
    if not counted or (selection is not None and not len(selection)):
        return []
    if ns.n_chunks > MATCHES:
        totals = accumulate(n for n, _ in counted)
        counted = [one for one, total in zip(counted, totals, strict=True) if total <= MATCHES] or counted[:1]
    listed = selection is not None and len(selection) <= _LISTED
    found = connection.dialect.lexical.scored(
        connection,
        ns.id,
        {word: n for n, word in counted},
        among=json.dumps(selection.ids.tolist()) if selection is not None and listed else None,
        best=k if selection is None or listed else None,
    )
    if selection is not None and not listed:
        inside = np.isin([chunk for chunk, _ in found], selection.ids)
        found = [one for one, chosen in zip(found, inside.tolist(), strict=True) if chosen]
    return sorted(found, key=lambda one: (-one[1], one[0]))[:k]


def word_scores(
    connection: Connection,
    ns: registry.Namespace,
    wanted: Sequence[str],
    ids: Sequence[int],
    counts: WordCounts,
) -> list[WordScores]:
    """BM25 of these chunks for each word alone, the rarest first; in a large namespace, whose index of
    tantivy is not there yet, none of the words that `search` leaves out."""
    tables, among = connection.dialect.lexical, json.dumps(list(ids))
    found: list[WordScores] = []
    total = 0
    for word in wanted:
        n = counts.of(connection, ns, word)
        if n > _COUNTED:  # exactly: the index has multiplied by its weight
            n = tables.count(connection, ns.id, word)
        total += n
        if ns.n_chunks > MATCHES and total > MATCHES:
            n = 0
        scores = tables.scored(connection, ns.id, {word: n}, among=among) if n and ids else []
        found.append(WordScores(weight(ns.n_chunks, n), dict(scores)))
    return found
