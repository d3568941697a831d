"""The sessions of a server on disk, in `sessions.sqlite` of the data folder: a restart goes on with them.

The server's memory is the truth and the file follows it. A session there is never older than what its client
has seen: where a change cannot be written, the file is removed, and written anew as soon as that is possible.
One server has the file; another one on the folder keeps its sessions in memory until it is free.

What is removed is overwritten with zeros (``secure_delete``), and the write-ahead log is emptied after it."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ragserve.answering.sessions.kept_dialogue import Dialogue
from ragserve.answering.sessions.lost_documents import lost_document
from ragserve.answering.sessions.session_record import SessionRecord, UnreadableSession, dialogue_of

if TYPE_CHECKING:
    from ragserve_index import IndexStore

log = logging.getLogger(__name__)
FILE_NAME = "sessions.sqlite"  # in the data folder
ASIDE = f"{FILE_NAME}.unreadable"
_APPLICATION_ID = 0x72677373  # "rgss"
_FORMAT = 1
_BUSY_S = 2.0  # a server that ends has the file for a moment longer
_TABLES = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    model TEXT NOT NULL,   -- fingerprint of what its token ids mean
    used_at REAL NOT NULL, -- Unix seconds
    data TEXT NOT NULL     -- `SessionRecord.session_json`
);
CREATE TABLE turns (
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL, -- from 0
    data TEXT NOT NULL,      -- `SessionRecord.turn_json`
    PRIMARY KEY (session, number)
)"""
_SAVE = """
INSERT INTO sessions (id, model, used_at, data) VALUES (?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET used_at = excluded.used_at, data = excluded.data"""


class _UnusableFile(Exception):
    """A database of something else, or of a later ragserve."""


class SessionStore:
    """The file of one server. All methods belong to its event loop; a thread does the work, in their order.
    None of them raises for a disk that fails: the log says so, and the sessions go on in memory."""

    def __init__(self, data_dir: Path, model: Callable[[], str]) -> None:
        """``model``: a fingerprint of what determines token ids, taken in the thread."""
        self._path = data_dir / FILE_NAME
        self._fingerprint = model
        self._model = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        self._connection: sqlite3.Connection | None = None
        self._was_open = self._failing = self._closed = False

    @property
    def is_open(self) -> bool:
        """False while changes are not written: it could not be opened, or has failed."""
        return self._connection is not None

    async def open(self) -> list[Dialogue]:
        """Open the file, and return the sessions in it; no session if it was open before, as memory knows
        better."""
        return await asyncio.wrap_future(self._thread.submit(self._try_to_open))

    def keep(self, dialogue: Dialogue) -> Awaitable[None]:
        """Write a session as it is now. Await it to know it on disk; it is written even if nobody does."""
        return self._change(partial(self._write, SessionRecord.of(dialogue)))

    def remove(self, names: Sequence[str]) -> Awaitable[None]:
        """Remove sessions, by id; await it as `keep`."""
        return self._change(lambda: self._remove(names))

    async def close(self) -> None:
        """Wait for all changes."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._close)
            await asyncio.to_thread(self._thread.shutdown)

    def _change(self, change: Callable[[], None]) -> Awaitable[None]:
        if self._closed:
            return asyncio.sleep(0)
        done = self._thread.submit(self._run, change)
        return asyncio.shield(asyncio.wrap_future(done))  # a reader who leaves does not take it back

    # --- in the thread

    def _run(self, change: Callable[[], None]) -> None:
        if self._connection is None:
            return
        try:
            change()
        except Exception as error:  # noqa: BLE001 - whatever it is, answers go on
            self._fail(error)
            self._close()
            with suppress(OSError):  # it is older than the sessions now
                _unlink(self._path)

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            known = isinstance(error, (sqlite3.Error, OSError))
            log.warning(
                "%s cannot be written, will retry: %s. Until then a restart forgets all sessions",
                self._path,
                "another server has it" if _is_busy(error) else error,
                exc_info=None if known else error,
            )
        self._failing = True

    def _try_to_open(self) -> list[Dialogue]:
        if self._connection is not None or self._closed:
            return []
        try:
            self._model = self._model or self._fingerprint()
            try:
                found = self._opened()
            except (_UnusableFile, sqlite3.DatabaseError) as error:
                self._close()
                if not (isinstance(error, _UnusableFile) or _is_damaged(error)):
                    raise
                _put_aside(self._path, error)
                found = self._opened()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server starts
            self._close()
            self._fail(error)
            return []
        if self._failing:
            log.info("%s can be written again", self._path)
        self._failing, self._was_open = False, True
        return found

    def _opened(self) -> list[Dialogue]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._path.chmod(0o600)
        self._connection = connection = _connect(self._path, _BUSY_S)
        if self._was_open:
            self._remove([name for (name,) in connection.execute("SELECT id FROM sessions")])
            return []
        return self._read()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RuntimeError("the store of sessions is used before it is opened, or after it was closed")
        return self._connection

    def _read(self) -> list[Dialogue]:
        found: list[Dialogue] = []
        useless: list[str] = []
        foreign = 0
        with _transaction(self._open()) as connection:
            for name, model, data in connection.execute(
                "SELECT id, model, data FROM sessions ORDER BY used_at"
            ).fetchall():
                if model != self._model:
                    foreign += 1
                    useless.append(name)
                    continue
                try:
                    found.append(dialogue_of(name, data, _turns(connection, name)))
                except UnreadableSession as error:
                    log.warning("a session cannot be read and is forgotten: %s", error)
                    useless.append(name)
        if useless:
            self._remove(useless)
        if foreign:
            log.info(
                "%d sessions were discarded: they belong to another model, tokenizer or template", foreign
            )
        return found

    def _write(self, record: SessionRecord) -> None:
        with _transaction(self._open()) as connection:
            row = (record.id, self._model, record.used_at, record.session_json())
            connection.execute(_SAVE, row)
            (count,) = connection.execute(
                "SELECT count(*) FROM turns WHERE session = ?", (record.id,)
            ).fetchone()
            connection.executemany(
                "INSERT INTO turns (session, number, data) VALUES (?, ?, ?)",
                ((record.id, number, record.turn_json(number)) for number in range(count, len(record.past))),
            )
            is_emptied = count > len(record.past)
            if is_emptied:
                connection.execute("DELETE FROM turns WHERE session = ?", (record.id,))
        if is_emptied:
            _empty_log(self._open())

    def _remove(self, names: Sequence[str]) -> None:
        _delete(self._open(), names)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def forget_all(data_dir: Path) -> None:
    """Remove the sessions of a data folder from disk, unless a server has them. Raises OSError."""
    path = data_dir / FILE_NAME
    if not path.exists():
        return
    try:
        _connect(path, 0).close()
    except sqlite3.DatabaseError as error:
        if _is_busy(error):
            log.warning("another server on %s keeps sessions on disk", data_dir)
            return
    except _UnusableFile as error:
        log.warning("%s stays: %s", path, error)
        return
    _unlink(path)


def forget_lost(data_dir: Path, store: IndexStore) -> None:
    """Take the texts of sessions that have lost a document from disk, unless a server has them, which finds
    out itself. A failure is logged: the next server tries again."""
    path = data_dir / FILE_NAME
    if not path.exists():
        return
    try:
        with closing(_connect(path, 0)) as connection:
            made_at = store.made_at()
            rows = connection.execute("SELECT id, data FROM sessions").fetchall()
            for name, data in rows:
                with suppress(UnreadableSession):
                    dialogue = dialogue_of(name, data, _turns(connection, name))
                    if dialogue.outdated is None and (lost := lost_document(dialogue, store, made_at)):
                        dialogue.end(lost)
                        row = (SessionRecord.of(dialogue).session_json(), name)
                        with _transaction(connection):
                            connection.execute("UPDATE sessions SET data = ? WHERE id = ?", row)
                            connection.execute("DELETE FROM turns WHERE session = ?", (name,))
            _empty_log(connection)
    except Exception as error:  # noqa: BLE001 - must not fail the removal, which is done
        if not _is_busy(error):
            log.warning("sessions with removed documents are still on disk: %s", error)


def _connect(path: Path, wait_s: float) -> sqlite3.Connection:
    """Open the file for this process alone; the kernel lets go of it when the process dies.

    Raises sqlite3.Error, and _UnusableFile."""
    connection = sqlite3.connect(path, timeout=wait_s, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda text: text.decode(errors="replace")  # a broken one is no JSON
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA temp_store = MEMORY")
        with _transaction(connection):
            _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables:
        for statement in _TABLES.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_FORMAT}")
    elif application != _APPLICATION_ID:
        raise _UnusableFile("it is an SQLite database, but not of sessions")
    elif version != _FORMAT:
        raise _UnusableFile(f"it has format {version}, and this ragserve reads format {_FORMAT}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _turns(connection: sqlite3.Connection, session: str) -> list[str]:
    rows = connection.execute("SELECT data FROM turns WHERE session = ? ORDER BY number", (session,))
    return [data for (data,) in rows]


def _delete(connection: sqlite3.Connection, names: Sequence[str]) -> None:
    with _transaction(connection):
        connection.executemany("DELETE FROM sessions WHERE id = ?", ((name,) for name in names))
    _empty_log(connection)


def _empty_log(connection: sqlite3.Connection) -> None:
    """Leave no text of before in the write-ahead log."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _put_aside(path: Path, why: Exception) -> None:
    """Raises OSError."""
    aside = path.with_name(ASIDE)
    _unlink(aside)
    path.replace(aside)
    with suppress(FileNotFoundError):
        path.with_name(f"{FILE_NAME}-wal").replace(f"{aside}-wal")
    log.warning(
        "the sessions in %s cannot be read and are forgotten: %s. The file is now %s. It holds texts of "
        "users: delete it if no other ragserve is to read it",
        path,
        why,
        aside.name,
    )


def _unlink(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _is_damaged(error: Exception) -> bool:
    """SQLITE_ERROR: a table or a column is missing."""
    return _name(error).startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"))


def _is_busy(error: Exception) -> bool:
    return _name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _name(error: Exception) -> str:
    return getattr(error, "sqlite_errorname", "") or ""
