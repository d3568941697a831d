"""The lexical index in Postgres: a table for each namespace, with each chunk's ``tsvector`` and a GIN index.

Postgres finds what matches. Its ``ts_rank`` knows no inverse document frequency, so BM25 is computed in SQL,
with FTS5's constants. A word has as many positions in a ``tsvector`` as places in the chunk, up to 255."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ragserve_index.bm25 import K1, B, weight
from ragserve_index.database import Connection, LexicalTables, lexical_table
from ragserve_index.lexical_differences import differences
from ragserve_index.structures.base import Ids
from ragserve_index.word_cutting import words

_MOST = 255  # positions of a word


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
        added = [(chunk_id, words(title) + words(text)) for chunk_id, title, text in rows]
        connection.executemany(
            f"INSERT INTO {lexical_table(namespace_id)} VALUES (?, ?, CAST(? AS TSVECTOR))",
            [(chunk_id, len(own), _tsvector(own)) for chunk_id, own in added],
        )
        self._grow(connection, namespace_id, sum(len(own) for _, own in added))

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

    def count(self, connection: Connection, namespace_id: int, word: str) -> int:
        found = connection.execute(
            f"SELECT count(*) FROM {lexical_table(namespace_id)} WHERE words @@ CAST(? AS tsquery)",
            (_any([word]),),
        )
        return int(found.fetchone()[0])

    def n_words(self, connection: Connection, namespace_id: int) -> int:
        row = connection.execute(
            "SELECT n_words FROM lexical_sizes WHERE namespace_id = ?", (namespace_id,)
        ).fetchone()
        return 0 if row is None else int(row[0])

    def lengths(self, connection: Connection, namespace_id: int, among: str) -> dict[int, int]:
        rows = connection.execute(
            f"SELECT chunk_id, n FROM {lexical_table(namespace_id)}"
            f" WHERE chunk_id IN (SELECT value FROM {connection.dialect.integers} one)",
            (among,),
        )
        return dict(rows.fetchall())

    def having(self, connection: Connection, namespace_id: int, word: str) -> Ids:
        rows = connection.stream(
            f"SELECT chunk_id FROM {lexical_table(namespace_id)} WHERE words @@ CAST(? AS tsquery)",
            (_any([word]),),
        )
        return np.fromiter((row[0] for row in rows), dtype=np.int64)

    def scored(
        self,
        connection: Connection,
        namespace_id: int,
        counts: dict[str, int],
        *,
        among: str | None = None,
        best: int | None = None,
    ) -> list[tuple[int, float]]:
        name = lexical_table(namespace_id)
        n_chunks, n_words = connection.execute(
            "SELECT ns.n_chunks, s.n_words FROM namespaces ns JOIN lexical_sizes s ON s.namespace_id = ns.id"
            " WHERE ns.id = ?",
            (namespace_id,),
        ).fetchone()
        wanted = list(counts)
        weights = [weight(n_chunks, n) * (K1 + 1) for n in counts.values()]
        chosen = f" AND chunk_id IN (SELECT value FROM {connection.dialect.integers} one)"
        found = connection.execute(
            # setweight and ts_filter leave the query's words of a chunk: unnesting all is ten times slower
            "SELECT m.chunk_id, sum(w.weight * f.n / (f.n + m.length)) AS score"
            f" FROM (SELECT chunk_id, ? + ? * n AS length, words FROM {name}"
            f" WHERE words @@ CAST(? AS tsquery){'' if among is None else chosen}) m"
            " CROSS JOIN LATERAL (SELECT lexeme, CAST(cardinality(positions) AS DOUBLE PRECISION) AS n"
            " FROM unnest(ts_filter(setweight(m.words, 'A', CAST(? AS TEXT[])), '{a}'))) f"
            " JOIN unnest(CAST(? AS TEXT[]), CAST(? AS DOUBLE PRECISION[])) AS w (lexeme, weight)"
            " ON w.lexeme = f.lexeme"
            " GROUP BY m.chunk_id ORDER BY score DESC, m.chunk_id" + ("" if best is None else " LIMIT ?"),
            [
                K1 * (1 - B),
                K1 * B * n_chunks / max(1, n_words),
                _any(wanted),
                *([] if among is None else [among]),
                wanted,
                wanted,
                weights,
                *([] if best is None else [best]),
            ],
        )
        return found.fetchall()


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def _any(wanted: Iterable[str]) -> str:
    return " | ".join(map(_quoted, wanted))


def _tsvector(own: Iterable[str]) -> str:
    positions = [str(position) for position in range(1, _MOST + 1)]
    return " ".join(f"{_quoted(word)}:{','.join(positions[:n])}" for word, n in Counter(own).items())
