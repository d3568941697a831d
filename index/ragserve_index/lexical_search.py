"""BM25 over a namespace's FTS5 table.

FTS5 has no top-k pruning. Its ``bm25()`` first counts the matches of each word and then scores each chunk
that matches, so an ordinary question takes 0.2 s at 100,000 chunks. Few chunks or matches: all of them are
scored. Many: the words are taken from the rarest on, as in MaxScore (Turtle and Flood, 1995).

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
import re
import sqlite3
import unicodedata
from collections.abc import Sequence
from math import log

import numpy as np

from ragserve_index import registry
from ragserve_index.lexical_table import table
from ragserve_index.structures.base import IdSelection

EXACT = 2_048  # chunks of the namespace, or matches of all words, up to which every match is scored
ROWS = 512  # matches of the rare words
POSTINGS = 16_384  # matches of the rare and the other words
MAX_FREQUENT = 8  # frequent words that count, the rarest
MAX_WORDS = 256  # read of a query
MAX_TERMS = 64  # used of them, the rarest
_SPARE = 4  # times k candidates are kept before frequent words are looked at
_LISTED = 4_096  # chunks of a filter up to which SQLite receives their ids
_MAX_COUNTS = 65_536
_DRIFT = 0.1  # change of a namespace's size from which on its words are counted again

_WORD = re.compile(r"\w+")
Scored = list[tuple[int, float]]
"""Chunk ids and BM25 scores, best first."""


class WordCounts:
    """Numbers of chunks that have a word, kept for frequent words, which take long to count. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], tuple[int, int]] = {}

    def of(self, connection: sqlite3.Connection, ns: registry.Namespace, word: str) -> int:
        """The number of chunks with the word, as it was when the namespace had about as many chunks."""
        known = self._counts.get((ns.id, word))
        if known is not None and abs(known[0] - ns.n_chunks) <= _DRIFT * ns.n_chunks:
            return known[1]
        name = table(ns.id)
        count = int(
            connection.execute(f"SELECT count(*) FROM {name} WHERE {name} MATCH ?", (word,)).fetchone()[0]
        )
        if count > ROWS:
            if len(self._counts) >= _MAX_COUNTS:
                self._counts.clear()
            self._counts[ns.id, word] = ns.n_chunks, count
        return count


def words(text: str) -> list[str]:
    """The distinct words of a text as FTS5 strings. Nothing of the text is left that FTS5 reads as syntax."""
    folded = unicodedata.normalize("NFC", text).lower()
    return [f'"{word}"' for word in list(dict.fromkeys(_WORD.findall(folded)))[:MAX_WORDS]]


def search(
    connection: sqlite3.Connection,
    ns: registry.Namespace,
    text: str,
    k: int,
    selection: IdSelection | None,
    counts: WordCounts,
) -> Scored:
    """The k best chunks (of the selection) that share a word with the text; fewer if fewer do."""
    counted = sorted((n, word) for word in words(text) if (n := counts.of(connection, ns, word)))[:MAX_TERMS]
    if not counted or (selection is not None and not len(selection)):
        return []
    find = _Finder(connection, ns, k, selection)
    if min(ns.n_chunks, sum(n for n, _ in counted)) <= EXACT:
        return find.best(_any([word for _, word in counted]))
    total = np.cumsum([n for n, _ in counted])
    n_rare, n_all = int((total <= ROWS).sum()), int((total <= POSTINGS).sum())
    telling = [word for n, word in counted if 2 * n < ns.n_chunks]
    if not telling:  # bm25() gives such words no weight: the first matches have to do
        return find.best(_any([word for _, word in counted]), rows=EXACT)
    every = telling[: n_all if n_rare else max(n_all, 2)]
    if find.listed is not None:
        chosen = find.best(_any(every))
        return chosen if len(chosen) >= k else find.best(_any(telling))
    frequent = counted[len(every) : len(telling)]
    found = _staged(find, every[:n_rare], every[n_rare:], frequent, ns.n_chunks)
    if len(found) >= k or n_rare == len(every):
        return sorted(found.items(), key=lambda one: (-one[1], one[0]))[:k]
    return find.best(_any(every))


def _staged(
    find: _Finder, rare: list[str], others: list[str], frequent: list[tuple[int, str]], n_chunks: int
) -> dict[int, float]:
    """Score the chunks that have a rare word, or the rarest other one and one more: chunk id -> score."""
    pairs = f"{others[0]} AND ({_any(others[1:])})" if len(others) > 1 else None
    queries = [_any(rare)] if rare else []
    if rare and others:
        queries.append(f"({_any(rare)}) AND ({_any(others)})")
    if pairs:
        queries.append(pairs)
    found: dict[int, float] = {}
    for query in queries:
        for chunk, score in find.best(query, k=_SPARE * find.k):
            found[chunk] = max(score, found.get(chunk, 0.0))
    gate = _any(rare) if rare else pairs
    for n, word in frequent[:MAX_FREQUENT] if gate else []:
        for chunk in find.having(f"({gate}) AND {word}"):
            if chunk in found:
                found[chunk] += log((n_chunks - n + 0.5) / (n + 0.5))
    return found


def _any(terms: Sequence[str]) -> str:
    return " OR ".join(terms)


class _Finder:
    """The best matches of FTS5 queries among the selected chunks."""

    def __init__(
        self, connection: sqlite3.Connection, ns: registry.Namespace, k: int, selection: IdSelection | None
    ) -> None:
        self._connection = connection
        self._table = table(ns.id)
        self.k = k
        self._selection = selection
        few = selection is not None and len(selection) <= _LISTED
        self.listed = json.dumps(selection.ids.tolist()) if selection is not None and few else None

    def having(self, query: str) -> list[int]:
        """All matches, without scores."""
        name = self._table
        rows = self._connection.execute(f"SELECT rowid FROM {name} WHERE {name} MATCH ?", (query,))
        return [row[0] for row in rows]

    def best(self, query: str, *, k: int | None = None, rows: int = -1) -> Scored:
        """The k best of the matches (of the first ``rows`` of them)."""
        name, k = self._table, k or self.k
        if self.listed is not None:
            # + keeps FTS5 from starting anew for each id; only selected rows are scored
            found = self._connection.execute(
                f"SELECT rowid, -bm25({name}) AS score FROM {name} WHERE {name} MATCH ?"
                " AND +rowid IN (SELECT value FROM json_each(?)) ORDER BY score DESC, rowid LIMIT ?",
                (query, self.listed, k),
            ).fetchall()
        elif self._selection is None and rows < 0:
            found = self._connection.execute(
                f"SELECT rowid, -rank FROM {name} WHERE {name} MATCH ? ORDER BY rank LIMIT ?",
                (query, k),
            ).fetchall()
        else:
            found = self._connection.execute(
                f"SELECT rowid, -bm25({name}) FROM {name} WHERE {name} MATCH ? LIMIT ?", (query, rows)
            ).fetchall()
            if self._selection is not None:
                inside = np.isin([chunk for chunk, _ in found], self._selection.ids)
                found = [one for one, chosen in zip(found, inside.tolist(), strict=True) if chosen]
        return sorted(found, key=lambda one: (-one[1], one[0]))[:k]
