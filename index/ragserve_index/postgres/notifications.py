"""Commits of other servers, by LISTEN and NOTIFY."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

import psycopg

from ragserve.errors import RagserveError

log = logging.getLogger(__name__)

CHANNEL = "ragserve_commits"
_RETRY_S = 1.0


class Listener:
    """Counts the notifications of a database, on a thread with a connection of its own, from the first look
    on."""

    def __init__(self, connect: Callable[[], psycopg.Connection]) -> None:
        self._connect = connect
        self._lock = Lock()
        self._thread: Thread | None = None
        self._end = Event()
        self._count: int | None = None
        self._seen = 0
        self._wake: tuple[int, int] | None = None

    def count(self) -> int | None:
        """A number that grows with every commit; None while the connection is not there."""
        if self._thread is None:
            with self._lock, suppress(OSError):  # no descriptor is left: the next look tries again
                if self._thread is None and not self._end.is_set():
                    self._wake = os.pipe()
                    self._thread = Thread(target=self._run, name="ragserve-listen", daemon=True)
                    self._thread.start()
        return self._count

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._end.set()
        with self._lock:
            if self._wake is None or self._thread is None:
                return
            os.write(self._wake[1], b"x")
            self._thread.join()
            for descriptor in self._wake:
                os.close(descriptor)
            self._wake = None

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    self._seen += 1  # something may have been committed before
                    self._count = self._seen
                    self._follow(connection)
            except (psycopg.Error, RagserveError, OSError) as error:
                if self._count is not None:  # once, not at every attempt
                    log.warning("The registry's notifications were lost (%s); connecting again", error)
                self._count = None
            self._end.wait(_RETRY_S)
        self._count = None

    def _follow(self, connection: psycopg.Connection) -> None:
        wake = self._wake[0] if self._wake is not None else -1
        poll = select.poll()  # select() takes no descriptor over 1,023
        for descriptor in (connection.fileno(), wake):
            poll.register(descriptor, select.POLLIN)
        while not self._end.is_set():
            poll.poll()
            for _ in connection.notifies(timeout=0):
                self._seen += 1
                self._count = self._seen
            if connection.closed:
                return
