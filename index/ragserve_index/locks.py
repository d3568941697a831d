"""Locks: many readers or one writer within a process, and one saver among processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock


class ReadWriteLock:
    """Any number of readers, or one writer. A waiting writer holds back new readers, so it cannot starve. Not reentrant."""

    def __init__(self) -> None:
        self._gate = Lock()  # a writer keeps it from the moment it waits until it is done
        self._room = Lock()  # held by the writer, or by the readers together
        self._count = Lock()
        self._readers = 0

    def acquire_read(self) -> None:
        with self._gate:
            pass
        with self._count:
            # The first reader may wait here for a writer that passed the gate between the two lines; the others queue behind it.
            if self._readers == 0:
                self._room.acquire()
            self._readers += 1

    def release_read(self) -> None:
        with self._count:
            self._readers -= 1
            if self._readers == 0:
                self._room.release()

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.acquire_read()
        try:
            yield
        finally:
            self.release_read()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._gate, self._room:
            yield


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Exclusive among processes and threads; the kernel frees it when its holder dies. Waits without a limit: holders only write a file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
