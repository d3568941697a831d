"""The registry's database as the rest of the package sees it: transactions, the changes of others, and what
SQL says differently in SQLite and Postgres.

SQL is written in what both understand, with ``?`` or ``?1`` for parameters, and takes the rest from the
connection's :class:`Dialect`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ragserve_index.structures.base import Ids
from ragserve_index.word_cutting import VERSION

log = logging.getLogger(__name__)

_DOCUMENTS = 64  # read at a time when a lexical index is built


class ResultRows(Protocol):
    """What a statement returned."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection in a transaction. ``stream`` reads rows as they are asked for, where there may be many.
    ``within`` raises TimeoutError when a statement of the block takes longer than so many seconds; the
    transaction is over then."""

    @property
    def dialect(self) -> Dialect: ...

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> ResultRows: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...

    def stream(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]: ...

    def within(self, seconds: float) -> AbstractContextManager[None]: ...


def lexical_table(namespace_id: int) -> str:
    """Name of the table with a namespace's words."""
    return f"lexical_{int(namespace_id)}"


class LexicalTables(ABC):
    """Where the words are, as `words` cuts them: a table for each namespace, which keeps the statistics of
    BM25, and with them the scores, free of other namespaces. The transaction that writes chunks writes it,
    too."""

    @abstractmethod
    def create(self, connection: Connection, namespace_id: int) -> None:
        """Create the empty index of a new namespace."""

    @abstractmethod
    def drop(self, connection: Connection, namespace_id: int) -> None:
        """Drop the index of a namespace, if it has one."""

    @abstractmethod
    def add(self, connection: Connection, namespace_id: int, documents: Sequence[int]) -> None:
        """Add the chunks of documents, given by row id."""

    @abstractmethod
    def remove(self, connection: Connection, namespace_id: int, documents: Sequence[int]) -> None:
        """Remove the chunks of documents that are about to be deleted, given by row id."""

    def build(self, connection: Connection, namespace_id: int) -> None:
        """Build the index anew from the chunks, in bounded memory."""
        self.drop(connection, namespace_id)
        self.create(connection, namespace_id)
        rows = connection.execute(
            "SELECT id FROM documents WHERE namespace_id = ? ORDER BY first_id", (namespace_id,)
        ).fetchall()
        for start in range(0, len(rows), _DOCUMENTS):
            self.add(connection, namespace_id, [row[0] for row in rows[start : start + _DOCUMENTS]])

    def build_outdated(self, connection: Connection) -> None:
        """Build all indexes anew if their words were cut in another way than `words` has now."""
        cut = connection.execute("SELECT version FROM lexical_words").fetchone()
        if cut is not None and cut[0] == VERSION:
            return
        for namespace_id, name in connection.execute("SELECT id, name FROM namespaces").fetchall():
            log.info("building the lexical index of namespace %s anew: words are cut in another way", name)
            self.build(connection, namespace_id)
        connection.execute("DELETE FROM lexical_words")
        connection.execute("INSERT INTO lexical_words VALUES (?)", (VERSION,))

    @abstractmethod
    def missing_and_extra(self, connection: Connection, namespace_id: int, expected: Ids) -> list[str]:
        """Compare the indexed ids with those of the chunks; return what differs."""

    @abstractmethod
    def damage(self, connection: Connection, namespace_id: int) -> str | None:
        """Check the index itself, in a write transaction; return what was found."""

    @abstractmethod
    def count(self, connection: Connection, namespace_id: int, word: str) -> int:
        """The number of chunks that have a word."""

    @abstractmethod
    def n_words(self, connection: Connection, namespace_id: int) -> int:
        """The number of words of all chunks together, titles included."""

    @abstractmethod
    def lengths(self, connection: Connection, namespace_id: int, among: str) -> dict[int, int]:
        """The number of words of each chunk among these, a JSON array of ids; those that are gone are left
        out."""

    @abstractmethod
    def having(self, connection: Connection, namespace_id: int, word: str) -> Ids:
        """Ids of the chunks that have a word."""

    @abstractmethod
    def scored(
        self,
        connection: Connection,
        namespace_id: int,
        counts: dict[str, int],
        *,
        among: str | None = None,
        best: int | None = None,
    ) -> list[tuple[int, float]]:
        """Ids of chunks that have one of the words in ``counts``, with the BM25 of all of these words.

        Args:
            counts: Numbers of chunks that have a word.
            among: Only of these chunks: a JSON array of ids.
            best: This many at most, the best."""


class Dialect(ABC):
    """What SQL says differently. ``integers`` and ``texts`` are tables with the elements of a JSON array,
    their one parameter, in a column ``value``. ``skip_locked`` ends a query for a row to change. ``nfc`` is
    the function that gives text its normal form.
    ``stamps_kept``: versions behind a saved index whose stamps stay, for the index files of other servers."""

    integers: str
    texts: str
    skip_locked: str
    nfc: str
    stamps_kept: int
    lexical: LexicalTables

    @abstractmethod
    def reserve_chunks(self, connection: Connection, n: int) -> int:
        """The first of ``n`` consecutive chunk ids that were never used."""

    @abstractmethod
    def one_of(self, field: str, values: tuple[Any, ...], out: list[Any]) -> str:
        """The condition that a metadata field is one of the values, never NULL; parameters go to ``out``."""

    @abstractmethod
    def in_range(self, field: str, bounds: Sequence[tuple[str, int | float | str]], out: list[Any]) -> str:
        """The same for bounds, (comparison, value) each, all numbers or all text."""


class CommitClock(Protocol):
    """Says without asking the registry that nothing was committed, where that can be known."""

    def settled(self) -> int | None:
        """A mark, or None if nothing can be known."""
        ...

    def is_still(self, mark: int) -> bool:
        """True only if nothing was committed since the mark was read."""
        ...


class Database(ABC):
    """The registry. Thread-safe; a connection serves one thread at a time.

    ``name`` says in messages where it is; ``shared``: servers on other machines may use it. After one of
    ``fatal``, errors of its driver, a transaction cannot go on."""

    name: str
    shared: bool
    fatal: tuple[type[Exception], ...]
    dialect: Dialect
    mark: CommitClock

    @abstractmethod
    def read(self) -> AbstractContextManager[Connection]:
        """A read transaction: all statements see one commit, and nobody waits for it."""

    @abstractmethod
    def write(self) -> AbstractContextManager[Connection]:
        """A write transaction, committed when the block ends and rolled back when it raises. One at a time
        among all processes: versions and the log of removed texts have one order."""

    @abstractmethod
    def update(self) -> AbstractContextManager[Connection]:
        """A write transaction over rows without such an order, as those of jobs; it need not wait for
        documents that are written meanwhile."""

    @abstractmethod
    def changes(self) -> int | None:
        """A mark that changes with every :meth:`write` of any process, if late by milliseconds; None if
        nothing can be known. Costs microseconds."""

    @abstractmethod
    def quick_check(self) -> list[str]:
        """The database's own integrity check; empty when it is sound."""

    @abstractmethod
    def close(self) -> None:
        """Close idle connections; others close after use. Waits for a write in progress. Idempotent."""
