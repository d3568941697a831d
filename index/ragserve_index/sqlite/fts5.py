"""The lexical index in SQLite: an FTS5 table for each namespace.

It stores no text (``content=''``): a row is removed by giving FTS5 the words that it was added with, which
the chunk still has, because chunk rows never change."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence

import numpy as np

from ragserve_index.database import Connection, LexicalTables, lexical_table
from ragserve_index.lexical_differences import differences
from ragserve_index.structures.base import Ids
from ragserve_index.word_cutting import SIGNS

# blanks part words; all characters beyond ASCII are of words
_TOKENIZER = f"ascii tokenchars ''{SIGNS}''"
CUT = "cut_words"
"""The function of a connection that cuts a text into words, joined by blanks."""
_ROWS = (
    " FROM json_each(?) wanted CROSS JOIN documents d ON d.id = wanted.value"
    " CROSS JOIN chunks c ON c.document = d.id ORDER BY c.chunk_id"
)


class Fts5(LexicalTables):
    """FTS5 scores with its ``bm25()``."""

    def create(self, connection: Connection, namespace_id: int) -> None:
        connection.execute(
            f"CREATE VIRTUAL TABLE {lexical_table(namespace_id)}"
            f" USING fts5(title, text, content='', tokenize='{_TOKENIZER}')"
        )

    def drop(self, connection: Connection, namespace_id: int) -> None:
        connection.execute(f"DROP TABLE IF EXISTS {lexical_table(namespace_id)}")

    def add(self, connection: Connection, namespace_id: int, documents: Sequence[int]) -> None:
        # FTS5 writes a segment whenever ids descend, so a batch is one statement
        connection.execute(
            f"INSERT INTO {lexical_table(namespace_id)} (rowid, title, text)"
            f" SELECT c.chunk_id, {CUT}(d.title), {CUT}(c.text){_ROWS}",
            (json.dumps(documents),),
        )

    def remove(self, connection: Connection, namespace_id: int, documents: Sequence[int]) -> None:
        name = lexical_table(namespace_id)
        connection.execute(
            f"INSERT INTO {name} ({name}, rowid, title, text)"
            f" SELECT 'delete', c.chunk_id, {CUT}(d.title), {CUT}(c.text){_ROWS}",
            (json.dumps(documents),),
        )

    def missing_and_extra(self, connection: Connection, namespace_id: int, expected: Ids) -> list[str]:
        try:
            rows = connection.execute(f"SELECT id FROM {lexical_table(namespace_id)}_docsize ORDER BY id")
        except sqlite3.OperationalError as error:
            return [f"the lexical index cannot be read: {error}"]
        return differences(np.fromiter((row[0] for row in rows), dtype=np.int64), expected)

    def damage(self, connection: Connection, namespace_id: int) -> str | None:
        name = lexical_table(namespace_id)
        try:
            connection.execute(f"INSERT INTO {name} ({name}) VALUES ('integrity-check')")
        except sqlite3.DatabaseError as error:
            return f"the lexical index is damaged: {error}"
        return None

    def count(self, connection: Connection, namespace_id: int, word: str) -> int:
        name = lexical_table(namespace_id)
        found = connection.execute(f"SELECT count(*) FROM {name} WHERE {name} MATCH ?", (_any([word]),))
        return int(found.fetchone()[0])

    def n_words(self, connection: Connection, namespace_id: int) -> int:
        # FTS5's record of averages: rows, then the words of each column
        row = connection.execute(
            f"SELECT block FROM {lexical_table(namespace_id)}_data WHERE id = 1"
        ).fetchone()
        return 0 if row is None else sum(_varints(row[0])[1:])

    def lengths(self, connection: Connection, namespace_id: int, among: str) -> dict[int, int]:
        rows = connection.execute(
            f"SELECT id, sz FROM {lexical_table(namespace_id)}_docsize"
            " WHERE id IN (SELECT value FROM json_each(?))",
            (among,),
        )
        return {chunk: sum(_varints(sizes)) for chunk, sizes in rows}

    def having(self, connection: Connection, namespace_id: int, word: str) -> Ids:
        name = lexical_table(namespace_id)
        rows = connection.execute(f"SELECT rowid FROM {name} WHERE {name} MATCH ?", (_any([word]),))
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
        name, match = lexical_table(namespace_id), _any(counts)
        if among is not None:
            # + keeps FTS5 from starting anew for each id; only selected rows are scored
            return connection.execute(
                f"SELECT rowid, -bm25({name}) AS score FROM {name} WHERE {name} MATCH ?"
                " AND +rowid IN (SELECT value FROM json_each(?)) ORDER BY score DESC, rowid LIMIT ?",
                (match, among, -1 if best is None else best),
            ).fetchall()
        if best is not None:
            return connection.execute(
                f"SELECT rowid, -rank FROM {name} WHERE {name} MATCH ? ORDER BY rank LIMIT ?", (match, best)
            ).fetchall()
        return connection.execute(
            f"SELECT rowid, -bm25({name}) FROM {name} WHERE {name} MATCH ?", (match,)
        ).fetchall()


def _any(words: Iterable[str]) -> str:
    """The query for one of the words, in which nothing is left that FTS5 reads as syntax."""
    return " OR ".join(f'"{word}"' for word in words)


def _varints(data: bytes) -> list[int]:
    """SQLite's integers of variable length: seven bits a byte, the highest first. A ninth byte has eight, but
    no number of words reaches it."""
    found, value = [], 0
    for byte in data:
        value = value << 7 | byte & 0x7F
        if not byte & 0x80:
            found.append(value)
            value = 0
    return found
