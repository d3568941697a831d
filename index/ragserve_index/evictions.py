"""The log of removed texts whose KV may still be cached. The removing transaction writes it; the owners of
caches read it.

It is a log, not a queue: several servers may use one registry, and each reads all of it. Acting on a
row twice is harmless; `forget` deletes rows. A text that comes back in the same document deletes its row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ragserve_index.database import Connection, Database

_ROW = "id, namespace, title, text, created_at"


@dataclass(frozen=True, slots=True)
class Eviction:
    """A removed chunk as prompts contain it, or a whole namespace if ``text`` is None. Ids grow; times are
    Unix seconds.
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
        """A mark that changes with every commit of documents of any process; None if nothing can be known, as
        during one. While it stays the same, the log has nothing new.
        """
        return self._database.changes()

    def after(self, last_id: int, limit: int, *, before: float | None = None) -> list[Eviction]:
        """Rows behind ``last_id``, oldest first; with ``before`` only rows older than that time."""
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT {_ROW} FROM evictions WHERE id > ?1 AND created_at < ?2 ORDER BY id LIMIT ?3",
                (last_id, _until(before), limit),
            )
            return [Eviction(*row) for row in rows]

    def forget(self, up_to_id: int, *, before: float | None = None) -> int:
        """Delete rows up to an id (older than a time) and return their number. Does not write if there are
        none.
        """
        condition, values = "id <= ?1 AND created_at < ?2", (up_to_id, _until(before))
        with self._database.read() as connection:
            found = connection.execute(f"SELECT 1 FROM evictions WHERE {condition} LIMIT 1", values)
            if not found.fetchone():
                return 0
        with self._database.write() as connection:
            return connection.execute(f"DELETE FROM evictions WHERE {condition}", values).rowcount

    def __len__(self) -> int:
        with self._database.read() as connection:
            return int(connection.execute("SELECT count(*) FROM evictions").fetchone()[0])


def _until(before: float | None) -> float:
    return inf if before is None else before


def log_document(connection: Connection, namespace: str, namespace_id: int, doc_id: str) -> None:
    """Log the texts of a document that is about to be deleted."""
    connection.execute(
        "INSERT INTO evictions (namespace, doc_id, title, text, created_at)"
        " SELECT ?, d.doc_id, d.title, c.text, ? FROM documents d"
        " JOIN chunks c ON c.document = d.id WHERE d.namespace_id = ? AND d.doc_id = ?",
        (namespace, time.time(), namespace_id, doc_id),
    )


def unlog_present(connection: Connection, namespace: str, document: int, doc_id: str, title: str) -> None:
    """Remove the texts of a document that was just written (row ``document``) from the log."""
    connection.execute(
        "DELETE FROM evictions WHERE namespace = ? AND doc_id = ? AND title = ?"
        " AND text IN (SELECT text FROM chunks WHERE document = ?)",
        (namespace, doc_id, title, document),
    )


def log_namespace(connection: Connection, namespace: str) -> None:
    """Log a dropped namespace: one row stands for all of its texts."""
    connection.execute("DELETE FROM evictions WHERE namespace = ?", (namespace,))
    connection.execute(
        "INSERT INTO evictions (namespace, doc_id, title, text, created_at) VALUES (?, NULL, '', NULL, ?)",
        (namespace, time.time()),
    )


def by_namespace(evictions: Sequence[Eviction]) -> dict[str, list[Eviction]]:
    """Group rows by namespace, in the log's order."""
    found: dict[str, list[Eviction]] = {}
    for one in evictions:
        found.setdefault(one.namespace, []).append(one)
    return found
