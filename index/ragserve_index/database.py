"""SQLite: a small pool of connections, read and write transactions, and its failures in our words.

WAL with ``synchronous=FULL``: a commit that returned survives a power cut. NORMAL would be faster by one
fsync per commit, but it may lose the last commits, and a lost commit could give its version number to other
content than an index file already holds, or forget a finished job whose upload is gone. Documents are written
in batches, so an fsync costs little beside embedding them."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from ragserve_index.errors import RagserveError, RegistryDamaged, StorageFull, Unavailable
from ragserve_index.locks import CommitMark
from ragserve_index.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION, TABLES

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 60.0
MAX_IDLE = 32
_MIN_FREE_BYTES = 1 << 20


class Database:
    """The registry file. Every method may be called from any thread; a connection serves one thread at a
    time.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises RegistryDamaged, StorageFull, Unavailable."""
        self.path = path
        self._idle: list[sqlite3.Connection] = []  # list.append and list.pop are atomic
        self._writing = (
            Lock()
        )  # threads of this process queue here instead of polling for the lock among processes
        self._closed = False
        self.mark = CommitMark(path.with_name("ragserve.commits"))
        try:
            with self.write() as connection:
                self._prepare(connection)
        except BaseException:
            self.close()
            raise

    def _prepare(self, connection: sqlite3.Connection) -> None:
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
            for step in range(version, SCHEMA_VERSION):
                for statement in MIGRATIONS[step].split(";\n"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            log.info("%s: the registry was brought from format %d to %d", self.path, version, SCHEMA_VERSION)
        elif version != SCHEMA_VERSION:
            raise RegistryDamaged(
                f"{self.path} has registry format {version}, this ragserve reads format {SCHEMA_VERSION}.",
                hint="Use the ragserve that wrote it, or another --data-dir and ingest again.",
                code="registry_format",
            )

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            connection.execute(
                "PRAGMA page_size = 8192"
            )  # five vectors of 384 to a page; without effect on an existing file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA journal_size_limit = 67108864")
        except BaseException:
            connection.close()
            raise
        return connection

    def acquire(self) -> sqlite3.Connection:
        """A connection in autocommit mode, for :meth:`release` after use. May raise sqlite3.Error: see
        :meth:`failure`.
        """
        if self._closed:
            raise _closed()
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def release(self, connection: sqlite3.Connection) -> None:
        """Give a connection back. One with a transaction left open by a failure is closed, which rolls it
        back.
        """
        if connection.in_transaction or self._closed or len(self._idle) >= MAX_IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A read transaction: all statements see one commit, and nobody waits for it."""
        connection: sqlite3.Connection | None = None
        try:
            connection = self.acquire()
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self.failure(error) from error
        finally:
            if connection is not None:
                self.release(connection)

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A write transaction, committed when the block ends and rolled back when it raises. One at a time
        among all processes.
        """
        with self._writing, self._marked():
            connection: sqlite3.Connection | None = None
            try:
                connection = self.acquire()
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self.failure(error) from error
            except UnicodeEncodeError as error:
                raise _not_unicode(error) from None
            finally:
                if connection is not None:
                    self.release(connection)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        if self._closed:
            raise _closed()
        try:
            with self.mark.changing(BUSY_TIMEOUT_S):
                yield
        except TimeoutError:
            raise self._busy() from None
        except OSError as error:
            if is_full(error):
                raise storage_full(self.path, error) from error
            raise

    def failure(self, error: sqlite3.Error) -> RagserveError:
        """What an SQLite error means to a user."""
        name = getattr(error, "sqlite_errorname", "") or ""
        if name == "SQLITE_FULL" or (
            name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")) and self._is_full()
        ):
            return storage_full(self.path, error)
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return RegistryDamaged(
                f"The registry {self.path} is damaged: {error}.",
                hint="Restore it from a backup, or move the data directory away and ingest again. "
                "`sqlite3 FILE .recover` may save part of it.",
            )
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return self._busy()
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

    def _busy(self) -> Unavailable:
        return Unavailable(
            f"Another process has kept the registry {self.path} locked for {BUSY_TIMEOUT_S:.0f} s.",
            hint="Try again when its ingestion step is done.",
            code="registry_busy",
        )

    def _is_full(self) -> bool:
        """SQLite reports some writes that found no room (of its -shm file, or over a size limit) as an
        input/output error.
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
        """SQLite's own integrity check; empty when the file is sound."""
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
        """Close what is idle; what is in use closes on release. Waits for a write under way. Idempotent."""
        with self._writing:
            if not self._closed:
                self._closed = True
                self.mark.close()
        while self._idle:
            self._idle.pop().close()


def _closed() -> Unavailable:
    return Unavailable("The index is closed.", code="index_closed")


def storage_full(path: Path, error: Exception) -> StorageFull:
    return StorageFull(
        f"No room left on the disk of {path}: {error}.",
        hint="Nothing was changed. Free some space, or use another --data-dir, and repeat.",
    )


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _not_unicode(error: UnicodeEncodeError) -> RagserveError:
    from ragserve_index.errors import InvalidRequest

    shown = error.object[max(0, error.start - 10) : error.start + 10]
    return InvalidRequest(
        f"Text with a lone surrogate cannot be stored: {shown!r}.",
        hint="Decode it with errors='replace'.",
        code="invalid_text",
    )
