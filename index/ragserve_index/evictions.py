"""Texts that went away and whose KV may still be cached: written in the transaction that removes them, read
by whoever holds the cache.

A log, not a queue: several servers may use one data directory, and each reads all of it. Whoever has acted on
a row may act on it again; rows go when `forget` is told to. A text that comes back in the same document takes
its row out again, so only what is gone is in the log."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ragserve_index.database import Database

_ROW = "id, namespace, title, text, created_at"


@dataclass(frozen=True, slots=True)
class Eviction:
    """A removed chunk as a prompt has it, or with ``text`` None a whole namespace. ``id`` grows with each;
    times are Unix seconds.
    """

    id: int
    namespace: str
    title: str
    text: str | None
    created_at: float


class EvictionLog:
    """Thread-safe, and safe among processes: each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def mark(self) -> int | None:
        """Changes with every commit of any process, and costs 50 ns; None while one is under way. Same mark:
        nothing new in the log.
        """
        return self._database.mark.settled()

    def after(self, last_id: int, limit: int, *, before: float | None = None) -> list[Eviction]:
        """Rows behind ``last_id``, oldest first; with ``before`` only those made before that time."""
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT {_ROW} FROM evictions WHERE id > ?1 AND (?2 IS NULL OR created_at < ?2) ORDER BY id LIMIT ?3",
                (last_id, before, limit),
            )
            return [Eviction(*row) for row in rows]

    def forget(self, up_to_id: int, *, before: float | None = None) -> int:
        """Drop the rows up to this one (made before that time); how many. Does not write where there are
        none.
        """
        condition = "id <= ?1 AND (?2 IS NULL OR created_at < ?2)"
        with self._database.read() as connection:
            if (
                connection.execute(
                    f"SELECT 1 FROM evictions WHERE {condition} LIMIT 1", (up_to_id, before)
                ).fetchone()
                is None
            ):
                return 0
        with self._database.write() as connection:
            return connection.execute(f"DELETE FROM evictions WHERE {condition}", (up_to_id, before)).rowcount

    def __len__(self) -> int:
        with self._database.read() as connection:
            return int(connection.execute("SELECT count(*) FROM evictions").fetchone()[0])


def log_document(connection: sqlite3.Connection, namespace: str, namespace_id: int, doc_id: str) -> None:
    """Before a document is deleted: note the texts of its chunks."""
    connection.execute(
        "INSERT INTO evictions (namespace, doc_id, title, text, created_at) SELECT ?, d.doc_id, d.title, c.text, ?"
        " FROM documents d JOIN chunks c ON c.document = d.id WHERE d.namespace_id = ? AND d.doc_id = ?",
        (namespace, time.time(), namespace_id, doc_id),
    )


def unlog_present(
    connection: sqlite3.Connection, namespace: str, document: int, doc_id: str, title: str
) -> None:
    """After a document (row ``document``) was written: its texts are there again, and their KV is theirs."""
    connection.execute(
        "DELETE FROM evictions WHERE namespace = ? AND doc_id = ? AND title = ? AND text IN (SELECT text FROM chunks WHERE document = ?)",
        (namespace, doc_id, title, document),
    )


def log_namespace(connection: sqlite3.Connection, namespace: str) -> None:
    """A namespace is dropped: one row stands for all of its texts."""
    connection.execute("DELETE FROM evictions WHERE namespace = ?", (namespace,))
    connection.execute(
        "INSERT INTO evictions (namespace, doc_id, title, text, created_at) VALUES (?, NULL, '', NULL, ?)",
        (namespace, time.time()),
    )


def rows_of(evictions: Sequence[Eviction]) -> dict[str, list[Eviction]]:
    """By namespace, each in the log's order."""
    found: dict[str, list[Eviction]] = {}
    for one in evictions:
        found.setdefault(one.namespace, []).append(one)
    return found
