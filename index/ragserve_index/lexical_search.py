"""BM25 over a namespace's lexical index.

Neither FTS5 nor Postgres prunes to the top k. FTS5's ``bm25()`` first counts the matches of each word and
then scores each chunk that matches, so an ordinary question takes 0.2 s at 100,000 chunks. Few chunks or
matches: all of them are scored. Many: the words are taken from the rarest on, as in MaxScore (Turtle and
Flood, 1995).

* ``rare``: the rarest words, up to ``ROWS`` matches together; ``others``: further ones, up to ``POSTINGS``
  matches, or the two rarest if none is rare; ``frequent``: the rest.
* Scored by ``bm25()`` are the chunks that have a rare word, and those that have the rarest of the others and
  one more. A chunk is in up to three queries, and the one that has all of its words gives it the highest
  score.
* A frequent word adds its inverse document frequency, as if a chunk of average length had it once: to chunks
  with a rare word, or to all if there is none. Words in half of the chunks add nothing, as in ``bm25()``.

If that finds too few, all chunks with a rare or other word are scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log

import numpy as np

from ragserve_index import registry
from ragserve_index.database import Connection, Query
from ragserve_index.structures.base import IdSelection

EXACT = 2_048  # chunks of the namespace, or matches of all words, up to which every match is scored
ROWS = 512  # matches of the rare words
POSTINGS = 16_384  # matches of the rare and the other words
MAX_FREQUENT = 8  # frequent words that count, the rarest
MAX_WORDS = 256  # read of a query
MAX_TERMS = 64  # used of them, the rarest
_SPARE = 4  # times k candidates are kept before frequent words are looked at
_LISTED = 4_096  # chunks of a filter up to which the database receives their ids
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
        if count > ROWS:
            if len(self._counts) >= _MAX_COUNTS:
                self._counts.clear()
            self._counts[ns.id, word] = ns.n_chunks, count
        return count


def word_counts(
    connection: Connection, ns: registry.Namespace, given: Sequence[str], counts: WordCounts
) -> dict[str, int]:
    """The number of chunks that each word is in; of a text of several words, the rarest."""
    words = connection.dialect.lexical.words
    return {
        text: min((counts.of(connection, ns, one) for one in words(connection, text, MAX_WORDS)), default=0)
        for text in given
    }


def search(
    connection: Connection,
    ns: registry.Namespace,
    text: str,
    k: int,
    selection: IdSelection | None,
    counts: WordCounts,
) -> Scored:
    """The k best chunks (of the selection) that share a word with the text; fewer if fewer do."""
    words = connection.dialect.lexical.words(connection, text, MAX_WORDS)
    counted = sorted((n, word) for word in words if (n := counts.of(connection, ns, word)))[:MAX_TERMS]
    if not counted or (selection is not None and not len(selection)):
        return []
    find = _Finder(connection, ns, k, selection, {word: n for n, word in counted})
    everything = (tuple(word for _, word in counted),)
    if min(ns.n_chunks, sum(n for n, _ in counted)) <= EXACT:
        return find.best(everything)
    total = np.cumsum([n for n, _ in counted])
    n_rare, n_all = int((total <= ROWS).sum()), int((total <= POSTINGS).sum())
    telling = tuple(word for n, word in counted if 2 * n < ns.n_chunks)
    if not telling:  # BM25 gives such words no weight: the first matches have to do
        return find.best(everything, rows=EXACT)
    every = telling[: n_all if n_rare else max(n_all, 2)]
    if find.listed is not None:
        chosen = find.best((every,))
        return chosen if len(chosen) >= k else find.best((telling,))
    frequent = counted[len(every) : len(telling)]
    found = _staged(find, every[:n_rare], every[n_rare:], frequent, ns.n_chunks)
    if len(found) >= k or n_rare == len(every):
        return sorted(found.items(), key=lambda one: (-one[1], one[0]))[:k]
    return find.best((every,))


def _staged(
    find: _Finder,
    rare: tuple[str, ...],
    others: tuple[str, ...],
    frequent: list[tuple[int, str]],
    n_chunks: int,
) -> dict[int, float]:
    """Score the chunks that have a rare word, or the rarest other one and one more: chunk id -> score."""
    pairs: Query = (others[:1], others[1:]) if len(others) > 1 else ()
    queries: list[Query] = [(rare,)] if rare else []
    if rare and others:
        queries.append((rare, others))
    if pairs:
        queries.append(pairs)
    found: dict[int, float] = {}
    for query in queries:
        for chunk, score in find.best(query, k=_SPARE * find.k):
            found[chunk] = max(score, found.get(chunk, 0.0))
    gate = (rare,) if rare else pairs
    for n, word in frequent[:MAX_FREQUENT] if gate else []:
        for chunk in find.having((*gate, (word,))):
            if chunk in found:
                found[chunk] += log((n_chunks - n + 0.5) / (n + 0.5))
    return found


class _Finder:
    """The best matches of queries among the selected chunks."""

    def __init__(
        self,
        connection: Connection,
        ns: registry.Namespace,
        k: int,
        selection: IdSelection | None,
        counts: dict[str, int],
    ) -> None:
        self._connection = connection
        self._lexical = connection.dialect.lexical
        self._ns = ns.id
        self._counts = counts
        self.k = k
        self._selection = selection
        few = selection is not None and len(selection) <= _LISTED
        self.listed = json.dumps(selection.ids.tolist()) if selection is not None and few else None

    def having(self, query: Query) -> list[int]:
        """All matches, without scores."""
        return self._lexical.having(self._connection, self._ns, query)

    def best(self, query: Query, *, k: int | None = None, rows: int | None = None) -> Scored:
        """The k best of the matches (of the first ``rows`` of them)."""
        k = k or self.k
        compared = self.listed is None and (self._selection is not None or rows is not None)
        found = self._lexical.scored(
            self._connection,
            self._ns,
            query,
            self._counts,
            among=self.listed,
            best=None if compared else k,
            rows=rows,
        )
        if compared and self._selection is not None:
            inside = np.isin([chunk for chunk, _ in found], self._selection.ids)
            found = [one for one, chosen in zip(found, inside.tolist(), strict=True) if chosen]
        return sorted(found, key=lambda one: (-one[1], one[0]))[:k]
