"""The lexical index: an FTS5 table for each namespace, written by the transaction that writes the chunks.

A table of its own keeps the statistics of BM25, and with them the scores, free of other namespaces. It stores
no text (``content=''``): a row is removed by giving FTS5 the words that it was added with, which the chunk
still has, because chunk rows never change."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

import numpy as np

from ragserve_index.structures.base import Ids

# Case and diacritics are folded; English endings are removed, too ("built", "builds" stay two words).
_TOKENIZER = "porter unicode61 remove_diacritics 2"
_DOCUMENTS = 64  # read by one statement when a table is built
_ROWS = (
    " FROM json_each(?) wanted CROSS JOIN documents d ON d.id = wanted.value"
    " CROSS JOIN chunks c ON c.document = d.id ORDER BY c.chunk_id"
)


def table(namespace_id: int) -> str:
    """Name of the namespace's table."""
    return f"lexical_{int(namespace_id)}"


def create(connection: sqlite3.Connection, namespace_id: int) -> None:
    """Create the empty table of a new namespace."""
    connection.execute(
        f"CREATE VIRTUAL TABLE {table(namespace_id)}"
        f" USING fts5(title, text, content='', tokenize='{_TOKENIZER}')"
    )


def drop(connection: sqlite3.Connection, namespace_id: int) -> None:
    """Drop the table of a namespace, if it has one."""
    connection.execute(f"DROP TABLE IF EXISTS {table(namespace_id)}")


def add(connection: sqlite3.Connection, namespace_id: int, documents: Sequence[int]) -> None:
    """Add the chunks of documents, given by row id. FTS5 writes a segment whenever ids descend, so a batch is
    one call."""
    connection.execute(
        f"INSERT INTO {table(namespace_id)} (rowid, title, text) SELECT c.chunk_id, d.title, c.text{_ROWS}",
        (json.dumps(documents),),
    )


def remove(connection: sqlite3.Connection, namespace_id: int, documents: Sequence[int]) -> None:
    """Remove the chunks of documents that are about to be deleted, given by row id."""
    name = table(namespace_id)
    connection.execute(
        f"INSERT INTO {name} ({name}, rowid, title, text)"
        f" SELECT 'delete', c.chunk_id, d.title, c.text{_ROWS}",
        (json.dumps(documents),),
    )


def build(connection: sqlite3.Connection, namespace_id: int) -> None:
    """Build the table anew from the chunks. Memory is bounded: FTS5 and SQLite spill to the disk."""
    drop(connection, namespace_id)
    create(connection, namespace_id)
    rows = connection.execute(
        "SELECT id FROM documents WHERE namespace_id = ? ORDER BY first_id", (namespace_id,)
    ).fetchall()
    for start in range(0, len(rows), _DOCUMENTS):
        add(connection, namespace_id, [row[0] for row in rows[start : start + _DOCUMENTS]])


def build_all(connection: sqlite3.Connection) -> None:
    """Build the tables of all namespaces."""
    for (namespace_id,) in connection.execute("SELECT id FROM namespaces").fetchall():
        build(connection, namespace_id)


def missing_and_extra(connection: sqlite3.Connection, namespace_id: int, expected: Ids) -> list[str]:
    """Compare the ids in the table with those of the chunks; return what differs."""
    try:
        rows = connection.execute(f"SELECT id FROM {table(namespace_id)}_docsize ORDER BY id")
    except sqlite3.OperationalError as error:
        return [f"the lexical index cannot be read: {error}"]
    have = np.fromiter((row[0] for row in rows), dtype=np.int64)
    return [
        f"{len(found)} {text}: {found[:5].tolist()}"
        for found, text in (
            (np.setdiff1d(expected, have), "chunks are missing from the lexical index"),
            (np.setdiff1d(have, expected), "ids in the lexical index have no chunk"),
        )
        if len(found)
    ]


def damage(connection: sqlite3.Connection, namespace_id: int) -> str | None:
    """Run FTS5's own check of the table, which needs a write transaction; return what it found."""
    name = table(namespace_id)
    try:
        connection.execute(f"INSERT INTO {name} ({name}) VALUES ('integrity-check')")
    except sqlite3.DatabaseError as error:
        return f"the lexical index is damaged: {error}"
    return None
