"""SQLite: a pool of connections, read and write transactions, and its failures as our errors.

WAL with ``synchronous=FULL``: a commit that returned survives a power cut. NORMAL would save one fsync per
commit, but may lose the last commits. A lost commit's version number could then be used for other content
than an index file already holds, and a finished job whose upload is deleted could be forgotten. Documents are
written in batches, so an fsync costs little beside embedding them."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from ragserve.errors import RagserveError, Unavailable
from ragserve_index.database import Database
from ragserve_index.errors import (
    RegistryDamaged,
    index_closed,
    is_full,
    lexical_index_damaged,
    lone_surrogate,
    registry_busy,
    short_of_descriptors,
    storage_full,
)
from ragserve_index.locks import CommitMark
from ragserve_index.sqlite.fts5 import CUT
from ragserve_index.sqlite.sqlite_dialect import SQLITE
from ragserve_index.sqlite.sqlite_schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION, TABLES
from ragserve_index.text_forms import normal
from ragserve_index.word_cutting import words

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 60.0
MAX_IDLE = 32
_MIN_FREE_BYTES = 1 << 20
_INSTRUCTIONS = 100_000  # of SQLite's machine between two looks at the clock: some milliseconds


class _Connection(sqlite3.Connection):
    writable = True
    dialect = SQLITE

    def stream(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        return iter(self.execute(sql, parameters))

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        end = time.monotonic() + seconds
        self.set_progress_handler(lambda: time.monotonic() > end, _INSTRUCTIONS)
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                raise TimeoutError from None
            raise
        finally:
            self.set_progress_handler(None, 0)


class SqliteDatabase(Database):
    """The registry file."""

    dialect = SQLITE
    shared = False
    fatal = ()
    mark: CommitMark

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises RegistryDamaged, StorageFull, Unavailable."""
        self.path = path
        self.name = str(path)
        self._idle: list[_Connection] = []  # list.append and list.pop are atomic
        # threads of this process queue here instead of polling for the lock among processes
        self._writing = Lock()
        self._closed = False
        self.mark = CommitMark(path.with_name("ragserve.commits"))
        try:
            with self.write() as connection:
                self._prepare(connection)
        except BaseException:
            self.close()
            raise

    def _prepare(self, connection: _Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            for statement in TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif application != APPLICATION_ID:
            raise RegistryDamaged(
                f"{self.path} is an SQLite database, but not ragserve's.", hint="Use another --data-dir."
            )
        elif version in MIGRATIONS:
            log.info("%s: migrating the registry to format %d", self.path, SCHEMA_VERSION)
            for step in map(MIGRATIONS.__getitem__, range(version, SCHEMA_VERSION)):
                for statement in step.split(";\n"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            log.info("%s: the registry was migrated from format %d to %d", self.path, version, SCHEMA_VERSION)
        elif version != SCHEMA_VERSION:
            raise RegistryDamaged(
                f"{self.path} has registry format {version}, this ragserve reads format {SCHEMA_VERSION}.",
                hint="Use the ragserve that wrote it, or another --data-dir and ingest again.",
                code="registry_format",
            )
        connection.dialect.lexical.build_outdated(connection)

    def _connect(self) -> _Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            factory=_Connection,
        )
        try:
            connection.create_function(SQLITE.nfc, 1, normal, deterministic=True)
            connection.create_function(CUT, 1, lambda text: " ".join(words(text)), deterministic=True)
            # five vectors of 384 components to a page; without effect on an existing file
            connection.execute("PRAGMA page_size = 8192")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            # opened while the disk is read-only, it could only read for ever
            connection.writable = os.access(self.path, os.W_OK)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[_Connection]:
        """A connection from the pool in a transaction. A failure closes it, which rolls back."""
        if self._closed:
            raise index_closed()
        connection: _Connection | None = None
        failed = True
        try:
            with suppress(IndexError):
                connection = self._idle.pop()
            connection = connection or self._connect()
            connection.execute(begin)
            yield connection
            connection.execute("COMMIT")
            failed = False
        except sqlite3.Error as error:
            raise self._failure(error) from error
        finally:
            if connection is not None:
                if failed or self._closed or not connection.writable or len(self._idle) >= MAX_IDLE:
                    connection.close()
                else:
                    self._idle.append(connection)

    def read(self) -> AbstractContextManager[_Connection]:
        return self._transaction("BEGIN")

    @contextmanager
    def write(self) -> Iterator[_Connection]:
        with self._writing:
            if self._closed:
                raise index_closed()
            try:
                with (
                    self.mark.changing(BUSY_TIMEOUT_S),
                    self._transaction("BEGIN IMMEDIATE") as connection,
                ):
                    yield connection
            except UnicodeEncodeError as error:
                raise lone_surrogate(error) from None
            except TimeoutError:
                raise registry_busy(self.name, BUSY_TIMEOUT_S) from None
            except OSError as error:
                if is_full(error):
                    raise storage_full(self.path, error) from error
                raise

    def update(self) -> AbstractContextManager[_Connection]:
        return self.write()

    def changes(self) -> int | None:
        return self.mark.settled()

    def _failure(self, error: sqlite3.Error) -> RagserveError:
        """The user's error for an SQLite error."""
        name = getattr(error, "sqlite_errorname", "") or ""
        may_be_full = name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN"))
        if name == "SQLITE_FULL" or (may_be_full and self._is_full()):
            return storage_full(self.path, error)
        if name == "SQLITE_CORRUPT_VTAB":
            return lexical_index_damaged(self.path, error)
        if "no such module: fts5" in str(error):
            return Unavailable(
                "SQLite of this Python has no FTS5, which lexical search needs.",
                hint="Use a Python whose sqlite3 module has it; those of Linux distributions do.",
                code="no_fts5",
            )
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return RegistryDamaged(
                f"The registry {self.path} is damaged: {error}.",
                hint="Restore it from a backup, or move the data directory away and ingest again. "
                "`sqlite3 FILE .recover` may save part of it.",
            )
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return registry_busy(self.name, BUSY_TIMEOUT_S)
        if name.startswith("SQLITE_CANTOPEN") and (short := short_of_descriptors(self.name)) is not None:
            return short
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            return Unavailable(
                f"The registry {self.path} cannot be opened for writing: {error}.",
                hint="Check the owner and the permissions of the data directory.",
                code="registry_not_writable",
            )
        return Unavailable(
            f"The registry {self.path} failed: {error} ({name or 'no code'}).",
            hint="See the log.",
            code="registry_failed",
        )

    def _is_full(self) -> bool:
        """Check for room, because SQLite reports some writes without it (of its -shm file, or over a size
        limit) as input/output errors.
        """
        import resource

        try:
            stat = os.statvfs(self.path.parent)
            if stat.f_bavail * stat.f_frsize < _MIN_FREE_BYTES:
                return True
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            sizes = [
                p.stat().st_size
                for suffix in ("", "-wal", "-shm")
                if (p := Path(f"{self.path}{suffix}")).exists()
            ]
        except OSError:
            return False
        return limit != resource.RLIM_INFINITY and any(size + _MIN_FREE_BYTES > limit for size in sizes)

    def quick_check(self) -> list[str]:
        try:
            with self.read() as connection:
                lines = [row[0] for row in connection.execute("PRAGMA quick_check(20)")]
                broken = connection.execute("PRAGMA foreign_key_check").fetchmany(20)
        except RegistryDamaged as error:
            return [str(error)]
        return [line for line in lines if line != "ok"] + [
            f"{table} row {row} refers to no {parent}" for table, row, parent, _ in broken
        ]

    def close(self) -> None:
        with self._writing:
            if not self._closed:
                self._closed = True
                self.mark.close()
        while self._idle:
            self._idle.pop().close()
