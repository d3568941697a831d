"""Locks: many readers or one writer within a process, and one saver among processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock


class ReadWriteLock:
    """Any number of readers, or one writer. A waiting writer holds back new readers, so it cannot starve. Not reentrant.

    A reader announces itself and then looks for a writer; a writer announces itself and then waits for the readers to leave. List appends
    and pops are atomic, so one of the two always sees the other, and a reader without a writer about pays a tenth of what locks cost.
    """

    def __init__(self) -> None:
        self._readers: list[None] = []
        self._writing = False
        self._gate = Lock()  # held by a writer from the moment it waits until it is done
        self._left = Condition(Lock())

    def acquire_read(self) -> None:
        while True:
            self._readers.append(None)
            if not self._writing:
                return
            self.release_read()
            with self._gate:  # until that writer is done
                pass

    def release_read(self) -> None:
        self._readers.pop()
        if self._writing:
            with self._left:
                self._left.notify()

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.acquire_read()
        try:
            yield
        finally:
            self.release_read()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._gate:
            self._writing = True
            try:
                with self._left:
                    while self._readers:
                        self._left.wait()
                yield
            finally:
                self._writing = False


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Exclusive among processes and threads; the kernel frees it when its holder dies. Waits without a limit: holders only write a file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
