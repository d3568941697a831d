"""Postgres: a pool of connections, read and write transactions, and its failures as our errors.

Writers of documents queue for an advisory lock, so that versions, chunk ids and the log of removed texts have
one order for all servers, as with SQLite's file lock. The lock belongs to the transaction: Postgres frees it,
and undoes the work, when its server dies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock
from typing import Any

from ragserve.errors import InvalidRequest, RagserveError, StorageFull, Unavailable
from ragserve_index.database import Database
from ragserve_index.errors import (
    RegistryDamaged,
    index_closed,
    lexical_index_damaged,
    lone_surrogate,
    registry_busy,
    short_of_descriptors,
)
from ragserve_index.postgres import postgres_schema as schema
from ragserve_index.postgres.postgres_dialect import POSTGRES, converted

try:
    import psycopg
    from psycopg import conninfo, errors
except ImportError as missing:
    raise Unavailable(
        "A registry in Postgres needs the package psycopg, which is not installed.",
        hint="pip install 'ragserve[postgres]'",
        code="no_psycopg",
    ) from missing

from ragserve_index.postgres.notifications import CHANNEL, Listener

BUSY_TIMEOUT_S = 60.0
HANGING_S = 120.0
CONNECT_TIMEOUT_S = 10
MIN_SERVER = 140_000
MAX_IDLE = 16
_LOCK = 0x52475356  # "RGSV", of advisory locks
_STREAMED = 256  # rows fetched at a time
_SESSION = (
    "SET client_encoding = 'UTF8'; SET standard_conforming_strings = on; SET extra_float_digits = 1;"
    # a server whose machine dies must not keep the others waiting
    " SET tcp_keepalives_idle = 30; SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 3"
)
# Nor may a database whose machine dies keep us waiting, and deaf to its notifications: seconds, and ms.
_DEAD_AFTER = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


class PostgresConnection:
    """A psycopg connection that takes the package's SQL."""

    dialect = POSTGRES

    def __init__(self, raw: psycopg.Connection) -> None:
        self.raw = raw
        self._streams = 0

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> psycopg.Cursor:
        query, values = _bound(sql, parameters)
        return self.raw.cursor(binary=True).execute(query, values)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        with self.raw.cursor() as cursor:
            cursor.executemany(converted(sql)[0], map(_storable, parameters))

    def stream(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        query, values = _bound(sql, parameters)
        self._streams += 1
        with self.raw.cursor(name=f"stream_{self._streams}", binary=True) as cursor:
            cursor.itersize = _STREAMED
            yield from cursor.execute(query, values, binary=True)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        self.raw.execute(f"SET LOCAL statement_timeout = {int(1000 * seconds)}")
        try:
            yield
        except errors.QueryCanceled:
            raise TimeoutError from None
        self.raw.execute("SET LOCAL statement_timeout = DEFAULT")


def _bound(sql: str, parameters: Sequence[Any]) -> tuple[Any, Any]:
    query, numbered = converted(sql)
    values = _storable(parameters)
    return query, {f"p{i}": value for i, value in enumerate(values, 1)} if numbered else values


def _storable(parameters: Sequence[Any]) -> list[Any]:
    """Postgres stores no NUL: the replacement character takes its place."""
    return [
        value.replace("\0", "\ufffd") if isinstance(value, str) and "\0" in value else value
        for value in parameters
    ]


def _begin_writing() -> str:
    # idle in a transaction: a process that hangs must not keep its locks
    return (
        f"BEGIN; SET LOCAL lock_timeout = {int(1000 * BUSY_TIMEOUT_S)};"
        f" SET LOCAL idle_in_transaction_session_timeout = {int(1000 * HANGING_S)}"
    )


class UnknowableCommits:
    """Says nothing: a search asks the registry each time, for a notification arrives after its commit."""

    def settled(self) -> int | None:
        return None

    def is_still(self, mark: int) -> bool:
        return False


class PostgresDatabase(Database):
    """The registry at a URL."""

    dialect = POSTGRES
    shared = True
    fatal = (psycopg.Error,)
    mark = UnknowableCommits()

    def __init__(self, url: str) -> None:
        """Connect, and create the tables in an empty database. Raises InvalidRequest, RegistryDamaged,
        Unavailable; no message has the password."""
        try:
            parts = conninfo.conninfo_to_dict(url)
            # of a password with an @, a colon or a slash, a part would be taken for these, and shown
            ports = str(parts.get("port", "")).replace(",", "")  # one for each of several hosts
            if "@" in str(parts.get("dbname", "")) or (not ports.isdigit() and ports):
                raise psycopg.ProgrammingError
        except psycopg.Error:
            raise InvalidRequest(  # libpq's own message may quote the password
                "registry_url is not the URL of a Postgres database.",
                hint="postgresql://USER:PASSWORD@HOST:5432/DATABASE; write @, : and / in a password as %40, "
                "%3A and %2F.",
                code="registry_url",
                param="registry_url",
            ) from None
        limits = {name: value for name, value in _DEAD_AFTER.items() if name not in parts}
        self._url = conninfo.make_conninfo(url, **limits)
        place = f"{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}"
        self.name = f"postgresql://{place}/{parts.get('dbname') or ''}"
        self._idle: list[psycopg.Connection] = []  # list.append and list.pop are atomic
        self._writing = Lock()  # threads of this process queue here instead of at the server
        self._closed = False
        self._listener = Listener(self._connect)
        try:
            with self.write() as connection:
                self._prepare(connection)
        except BaseException:
            self.close()
            raise

    def _prepare(self, connection: PostgresConnection) -> None:
        version = connection.raw.info.server_version
        (encoding,) = connection.execute("SHOW server_encoding").fetchone() or ("",)
        if version < MIN_SERVER or encoding != "UTF8":
            raise Unavailable(
                f"{self.name} is Postgres {version // 10_000} with encoding {encoding}; ragserve needs "
                f"Postgres {MIN_SERVER // 10_000} or newer with UTF8.",
                hint="Use a newer server, or CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0.",
                code="registry_version",
            )
        (ours, theirs) = connection.execute(
            "SELECT to_regclass('ragserve_registry') IS NOT NULL, to_regclass('namespaces') IS NOT NULL"
            " OR to_regclass('documents') IS NOT NULL OR to_regclass('jobs') IS NOT NULL"
        ).fetchone() or (False, False)
        if ours:
            (found,) = connection.execute("SELECT format FROM ragserve_registry").fetchone() or (0,)
            for step in range(found, schema.FORMAT) if found in schema.MIGRATIONS else ():
                connection.raw.execute(schema.MIGRATIONS[step])
                connection.execute("UPDATE ragserve_registry SET format = ?", (schema.FORMAT,))
                found = schema.FORMAT
            if found != schema.FORMAT:
                raise RegistryDamaged(
                    f"{self.name} has registry format {found}, this ragserve reads format {schema.FORMAT}.",
                    hint="Use the ragserve that wrote it, or another database and ingest again.",
                    code="registry_format",
                )
        elif theirs:
            raise RegistryDamaged(
                f"{self.name} has tables of another program.", hint="Use a database, or a schema, of its own."
            )
        else:
            connection.raw.execute(schema.TABLES)
            connection.execute("INSERT INTO ragserve_registry VALUES (?)", (schema.FORMAT,))
        connection.dialect.lexical.build_outdated(connection)

    def _connect(self) -> psycopg.Connection:
        try:
            raw = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="ragserve",
            )
        except (psycopg.Error, OSError) as error:
            raise self._refused(error) from None
        try:
            raw.execute(_SESSION)
        except BaseException:
            raw.close()
            raise
        return raw

    def _begun(self, begin: str) -> psycopg.Connection:
        """A connection in a transaction; an idle one may have been cut off since it was last used."""
        while True:
            raw = None
            with suppress(IndexError):
                raw = self._idle.pop()
            fresh = raw is None
            raw = raw or self._connect()
            try:
                raw.execute(begin, prepare=False)
                return raw
            except BaseException as error:
                lost = raw.closed and isinstance(error, psycopg.OperationalError)
                raw.close()
                if fresh or not lost:
                    raise

    @contextmanager
    def _transaction(self, begin: str, commit: str = "COMMIT") -> Iterator[PostgresConnection]:
        """A connection from the pool in a transaction. A failure closes it, which rolls back."""
        if self._closed:
            raise index_closed()
        raw: psycopg.Connection | None = None
        failed = True
        try:
            raw = self._begun(begin)
            yield PostgresConnection(raw)
            raw.execute(commit, prepare=False)
            failed = False
        except psycopg.Error as error:
            raise self._failure(error) from error
        except UnicodeEncodeError as error:
            raise lone_surrogate(error) from None
        finally:
            if raw is not None:
                if failed or self._closed or len(self._idle) >= MAX_IDLE:
                    raw.close()
                else:
                    self._idle.append(raw)

    def read(self) -> AbstractContextManager[PostgresConnection]:
        return self._transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    @contextmanager
    def write(self) -> Iterator[PostgresConnection]:
        lock = f"SELECT pg_advisory_xact_lock({_LOCK}, CAST(to_regnamespace(current_schema()) AS OID)::int)"
        with (
            self._writing,
            self._transaction(f"{_begin_writing()}; {lock}", f"NOTIFY {CHANNEL}; COMMIT") as connection,
        ):
            yield connection

    def update(self) -> AbstractContextManager[PostgresConnection]:
        return self._transaction(_begin_writing())

    def changes(self) -> int | None:
        return self._listener.count()

    def _refused(self, error: psycopg.Error | OSError) -> RagserveError:
        """The user's error for a connection that was not made."""
        reason = " ".join(str(error).split())
        if (short := short_of_descriptors(self.name)) is not None:
            return short
        if "authentication" in reason or "password" in reason or "no pg_hba.conf entry" in reason:
            return Unavailable(
                f"{self.name} refused the user or the password of registry_url.",
                hint="Check both, and the server's pg_hba.conf.",
                code="registry_refused",
            )
        return Unavailable(
            f"The registry {self.name} cannot be reached: {reason}.",
            hint="Check that Postgres runs there, that the database exists, and registry_url.",
            code="registry_unreachable",
        )

    def _failure(self, error: psycopg.Error) -> RagserveError:
        """The user's error for a Postgres error."""
        match error:
            case errors.LockNotAvailable():
                return registry_busy(self.name, BUSY_TIMEOUT_S)
            case errors.DiskFull():
                return StorageFull(
                    f"No room left on the disk of {self.name}: {error}.",
                    hint="This step was undone. Free some space there and repeat.",
                )
            case errors.ReadOnlySqlTransaction() | errors.InsufficientPrivilege():
                return Unavailable(
                    f"The registry {self.name} cannot be written: {error}.",
                    hint="The user of registry_url needs to own the schema, on a server that is no standby.",
                    code="registry_not_writable",
                )
            case errors.DataCorrupted() | errors.IndexCorrupted():
                return RegistryDamaged(
                    f"The registry {self.name} is damaged: {error}.", hint="Restore it from a backup."
                )
            case errors.UndefinedTable() if "lexical_" in str(error):
                return lexical_index_damaged(self.name, error)
            case psycopg.OperationalError() | errors.IdleInTransactionSessionTimeout():
                return Unavailable(
                    f"The connection to the registry {self.name} was lost: {error}.",
                    hint="What was being written may be done or not; repeating it is safe.",
                    code="registry_unreachable",
                )
        return Unavailable(
            f"The registry {self.name} failed: {error} ({error.sqlstate or 'no code'}).",
            hint="See the log.",
            code="registry_failed",
        )

    def quick_check(self) -> list[str]:
        """Empty: Postgres enforces the references between tables and has checksums of its own."""
        with self.read() as connection:
            connection.execute("SELECT format FROM ragserve_registry")
        return []

    def close(self) -> None:
        with self._writing:
            self._closed = True
        self._listener.close()
        while self._idle:
            self._idle.pop().close()
