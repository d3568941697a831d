"""BM25 over a namespace's FTS5 table.

FTS5 has no top-k pruning: ``bm25()`` reads all postings of each word of the query twice and costs a
microsecond for each chunk that matches, so the words of an ordinary question take a second at a million
chunks. Few matches: all of them are scored. Many: the words are taken from the rarest on, as in MaxScore
(Turtle and Flood, 1995).

* ``rare``: the rarest words, up to ``ROWS`` matches. ``others``: all further ones that are in at most
  ``COMMON`` of the chunks; more frequent words say nothing about a chunk and are ignored.
* Scored are the chunks that have a rare word, and those that have the rarest of the others and one more.
* Scores are exact. A chunk is in up to three of the queries below, and the one that has all of its words
  gives it the highest score.

If that finds too few, all chunks with a word that is not common are scored."""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from collections.abc import Sequence

import numpy as np

from ragserve_index import registry
from ragserve_index.lexical import table
from ragserve_index.structures.base import IdSelection

EXACT = 8_192  # matches of all words up to which every one is scored
ROWS = 2_048  # matches of the rare words
COMMON = 0.05  # share of the chunks from which on a word is common
MAX_WORDS = 256  # read of a query
MAX_TERMS = 64  # used of them, the rarest
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
    if sum(n for n, _ in counted) <= EXACT:
        return find.best(_any([word for _, word in counted]))
    telling = [(n, word) for n, word in counted if n <= COMMON * ns.n_chunks]
    if not telling:  # nothing but common words: the best of the first matches has to do
        return find.best(_any([word for _, word in counted]), rows=EXACT)
    every = [word for _, word in telling]
    if find.listed is None:
        total = np.cumsum([n for n, _ in telling])
        rare, others = every[: int((total <= ROWS).sum())], every[int((total <= ROWS).sum()) :]
        queries = [_any(rare)] if rare else []
        if rare and others:
            queries.append(f"({_any(rare)}) AND ({_any(others)})")
        if len(others) > 1:
            queries.append(f"{others[0]} AND ({_any(others[1:])})")
        found: dict[int, float] = {}
        for query in queries:
            for chunk, score in find.best(query):
                found[chunk] = max(score, found.get(chunk, 0.0))
        if len(found) >= k or not others:
            return sorted(found.items(), key=lambda one: (-one[1], one[0]))[:k]
    return find.best(_any(every))


def _any(terms: Sequence[str]) -> str:
    return " OR ".join(terms)


class _Finder:
    """The best matches of FTS5 queries among the selected chunks."""

    def __init__(
        self, connection: sqlite3.Connection, ns: registry.Namespace, k: int, selection: IdSelection | None
    ) -> None:
        self._connection = connection
        self._table = table(ns.id)
        self._k = k
        self._selection = selection
        few = selection is not None and len(selection) <= _LISTED
        self.listed = json.dumps(selection.ids.tolist()) if selection is not None and few else None

    def best(self, query: str, *, rows: int = -1) -> Scored:
        """The k best of the matches (of the first ``rows`` of them)."""
        name = self._table
        if self.listed is not None:
            # + keeps FTS5 from starting anew for each id; only selected rows are scored
            found = self._connection.execute(
                f"SELECT rowid, -bm25({name}) AS score FROM {name} WHERE {name} MATCH ?"
                " AND +rowid IN (SELECT value FROM json_each(?)) ORDER BY score DESC, rowid LIMIT ?",
                (query, self.listed, self._k),
            ).fetchall()
        elif self._selection is None and rows < 0:
            found = self._connection.execute(
                f"SELECT rowid, -rank FROM {name} WHERE {name} MATCH ? ORDER BY rank LIMIT ?",
                (query, self._k),
            ).fetchall()
        else:
            found = self._connection.execute(
                f"SELECT rowid, -bm25({name}) FROM {name} WHERE {name} MATCH ? LIMIT ?", (query, rows)
            ).fetchall()
            if self._selection is not None:
                inside = np.isin([chunk for chunk, _ in found], self._selection.ids)
                found = [one for one, chosen in zip(found, inside.tolist(), strict=True) if chosen]
        return sorted(found, key=lambda one: (-one[1], one[0]))[: self._k]
