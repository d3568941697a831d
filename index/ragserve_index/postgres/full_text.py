"""The lexical index in Postgres: a table for each namespace, with each chunk's ``tsvector`` and a GIN index.

Words are folded here as FTS5's unicode61 does (runs of letters and digits, without case and the diacritics of
Latin letters) and stemmed by Postgres's Porter stemmer, without stop words. Postgres finds what matches. Its
``ts_rank`` knows no inverse document frequency, so BM25 is computed in SQL, with FTS5's constants."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from math import log

import numpy as np

from ragserve_index.database import Connection, LexicalTables, Query, lexical_table
from ragserve_index.lexical_differences import differences
from ragserve_index.structures.base import Ids

_K1, _B = 1.2, 0.75
_LEAST = 1e-6  # weight of a word that is in half of the chunks, or more
_ACCENTS = re.compile("([A-Za-z\u00c0-\u024f])[\u0300-\u036f]+")  # of Latin letters, as FTS5
_SEPARATORS = re.compile(r"[\W_]+")


def folded(text: str) -> list[str]:
    """The words of a text, without case and diacritics."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", _ACCENTS.sub(r"\1", unicodedata.normalize("NFD", text)))
        text = text.encode(errors="ignore").decode()  # lone surrogates match nothing
    return [word for word in _SEPARATORS.split(text.lower()) if word]


class FullText(LexicalTables):
    """``tsvector`` and GIN."""

    def create(self, connection: Connection, namespace_id: int) -> None:
        name = lexical_table(namespace_id)
        connection.execute(
            f"CREATE TABLE {name} (chunk_id BIGINT PRIMARY KEY, n INTEGER NOT NULL, words TSVECTOR NOT NULL)"
        )
        connection.execute(f"CREATE INDEX {name}_words ON {name} USING gin (words)")
        connection.execute(
            "INSERT INTO lexical_sizes VALUES (?, 0) ON CONFLICT (namespace_id) DO UPDATE SET n_words = 0",
            (namespace_id,),
        )

    def drop(self, connection: Connection, namespace_id: int) -> None:
        connection.execute(f"DROP TABLE IF EXISTS {lexical_table(namespace_id)}")

    def add(self, connection: Connection, namespace_id: int, documents: Sequence[int]) -> None:
        rows = connection.stream(
            f"SELECT c.chunk_id, d.title, c.text FROM {connection.dialect.integers} wanted"
            " JOIN documents d ON d.id = wanted.value JOIN chunks c ON c.document = d.id",
            (json.dumps(documents),),
        )
        added = [(chunk_id, folded(f"{title} {text}")) for chunk_id, title, text in rows]
        connection.executemany(
            f"INSERT INTO {lexical_table(namespace_id)} VALUES (?, ?, to_tsvector('ragserve', ?))",
            [(chunk_id, len(words), " ".join(words)) for chunk_id, words in added],
        )
        self._grow(connection, namespace_id, sum(len(words) for _, words in added))

    def remove(self, connection: Connection, namespace_id: int, documents: Sequence[int]) -> None:
        (n,) = connection.execute(
            f"WITH gone AS (DELETE FROM {lexical_table(namespace_id)} l"
            f" USING {connection.dialect.integers} wanted, chunks c"
            " WHERE c.document = wanted.value AND l.chunk_id = c.chunk_id RETURNING l.n)"
            " SELECT CAST(coalesce(sum(n), 0) AS BIGINT) FROM gone",
            (json.dumps(documents),),
        ).fetchone()
        self._grow(connection, namespace_id, -n)

    def _grow(self, connection: Connection, namespace_id: int, n: int) -> None:
        connection.execute(
            "UPDATE lexical_sizes SET n_words = n_words + ? WHERE namespace_id = ?", (n, namespace_id)
        )

    def missing_and_extra(self, connection: Connection, namespace_id: int, expected: Ids) -> list[str]:
        name = lexical_table(namespace_id)
        if connection.execute("SELECT to_regclass(?)", (name,)).fetchone()[0] is None:
            return [f"the lexical index cannot be read: there is no table {name}"]
        rows = connection.stream(f"SELECT chunk_id FROM {name} ORDER BY chunk_id")
        return differences(np.fromiter((row[0] for row in rows), dtype=np.int64), expected)

    def damage(self, connection: Connection, namespace_id: int) -> str | None:
        name = lexical_table(namespace_id)
        if connection.execute("SELECT to_regclass(?)", (name,)).fetchone()[0] is None:
            return f"the lexical index is damaged: there is no table {name}"
        (have,) = connection.execute(f"SELECT CAST(coalesce(sum(n), 0) AS BIGINT) FROM {name}").fetchone()
        (kept,) = connection.execute(
            "SELECT n_words FROM lexical_sizes WHERE namespace_id = ?", (namespace_id,)
        ).fetchone() or (None,)
        return None if have == kept else f"the lexical index is damaged: it has {have} words, not {kept}"

    def words(self, connection: Connection, text: str, limit: int) -> list[str]:
        first = list(dict.fromkeys(folded(text)))[:limit]
        rows = connection.execute(
            "SELECT lexeme FROM unnest(to_tsvector('ragserve', ?)) ORDER BY lexeme", (" ".join(first),)
        )
        return [row[0] for row in rows]

    def count(self, connection: Connection, namespace_id: int, word: str) -> int:
        found = connection.execute(
            f"SELECT count(*) FROM {lexical_table(namespace_id)} WHERE words @@ CAST(? AS tsquery)",
            (_quoted(word),),
        )
        return int(found.fetchone()[0])

    def having(self, connection: Connection, namespace_id: int, query: Query) -> list[int]:
        rows = connection.execute(
            f"SELECT chunk_id FROM {lexical_table(namespace_id)} WHERE words @@ CAST(? AS tsquery)",
            (_match(query),),
        )
        return [row[0] for row in rows]

    def scored(
        self,
        connection: Connection,
        namespace_id: int,
        query: Query,
        counts: dict[str, int],
        *,
        among: str | None = None,
        best: int | None = None,
        rows: int | None = None,
    ) -> list[tuple[int, float]]:
        name = lexical_table(namespace_id)
        n_chunks, n_words = connection.execute(
            "SELECT ns.n_chunks, s.n_words FROM namespaces ns JOIN lexical_sizes s ON s.namespace_id = ns.id"
            " WHERE ns.id = ?",
            (namespace_id,),
        ).fetchone()
        words = list(dict.fromkeys(word for group in query for word in group))
        weights = [_weight(n_chunks, counts[word]) * (_K1 + 1) for word in words]
        limits = "" if rows is None else " LIMIT ?"
        if among is not None:
            limits = f" AND chunk_id IN (SELECT value FROM {connection.dialect.integers} one){limits}"
        found = connection.execute(
            # setweight and ts_filter leave the query's words of a chunk: unnesting all is ten times slower
            "SELECT m.chunk_id, sum(w.weight * f.n / (f.n + m.length)) AS score"
            f" FROM (SELECT chunk_id, ? + ? * n AS length, words FROM {name}"
            f" WHERE words @@ CAST(? AS tsquery){limits}) m"
            " CROSS JOIN LATERAL (SELECT lexeme, CAST(cardinality(positions) AS DOUBLE PRECISION) AS n"
            " FROM unnest(ts_filter(setweight(m.words, 'A', CAST(? AS TEXT[])), '{a}'))) f"
            " JOIN unnest(CAST(? AS TEXT[]), CAST(? AS DOUBLE PRECISION[])) AS w (lexeme, weight)"
            " ON w.lexeme = f.lexeme"
            " GROUP BY m.chunk_id ORDER BY score DESC, m.chunk_id" + ("" if best is None else " LIMIT ?"),
            [
                _K1 * (1 - _B),
                _K1 * _B * n_chunks / max(1, n_words),
                _match(query),
                *([] if among is None else [among]),
                *([] if rows is None else [rows]),
                words,
                words,
                weights,
                *([] if best is None else [best]),
            ],
        )
        return found.fetchall()


def _weight(n_chunks: int, n: int) -> float:
    """Inverse document frequency. ``n`` may exceed ``n_chunks``: it may have been counted before removals."""
    return log((n_chunks - n + 0.5) / (n + 0.5)) if 2 * n < n_chunks else _LEAST


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def _match(query: Query) -> str:
    return " & ".join(f"({' | '.join(map(_quoted, group))})" for group in query)
