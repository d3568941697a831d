"""Locks: many readers or one writer within a process, one file lock among processes, and the commit mark."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock

from ragserve.errors import explained

_MARK = struct.Struct("=Q")


class ReadWriteLock:
    """Locks for any number of readers or one writer. A waiting writer holds back new readers, so it cannot
    starve. Not reentrant."""

    def __init__(self) -> None:
        self._readers = 0
        self._writing = False  # or waiting to write
        self._changed = Condition(Lock())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait until no writer is active or waiting."""
        with self._changed:
            while self._writing:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if self._writing and not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait until every other writer and all readers have left."""
        with self._changed:
            while self._writing:
                self._changed.wait()
            self._writing = True
            while self._readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Exclusive among processes and threads; the kernel frees it when its holder dies. Waits without a limit,
    because a holder only reads or writes one file. On a read-only disk, where nobody writes, the file must be
    there. Raises StorageFull or Unavailable, and OSError for what users cannot end.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.EROFS:
            if (said := explained(error)) is None:
                raise
            raise said from error
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # closing alone leaves it locked when a fork has a copy of the descriptor
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


class CommitMark:
    """Eight bytes of shared memory that change with every commit of any process. Reading them costs 50 ns;
    asking SQLite costs 40 us, half of an hnsw or ivf search.

    A writer sets the mark to a fresh odd number before it commits and to a fresh even one after; a file lock
    keeps writers apart meanwhile. A reader that saw an even mark before it asked SQLite need not ask again
    while the mark is the same. A writer killed in between leaves an odd mark, and readers then ask every
    time, until the next write."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_size < _MARK.size:
                os.pwrite(self._descriptor, _MARK.pack(self._fresh() | 1), 0)
            self._map = mmap.mmap(self._descriptor, _MARK.size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._descriptor)
            raise
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._value: Sequence[int] = memoryview(self._map).cast("Q")

    @staticmethod
    def _fresh() -> int:
        return secrets.randbits(63) << 1

    def settled(self) -> int | None:
        """The mark, or None while a commit is under way or after its writer died."""
        value = self._value[0]
        return None if value & 1 else value

    def is_still(self, mark: int) -> bool:
        """True if nothing was committed since the mark was read."""
        return self._value[0] == mark

    @contextmanager
    def changing(self, timeout_s: float) -> Iterator[None]:
        """Context manager for a write transaction. Raises TimeoutError when another process stays in one for
        ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        pause = 0.0005
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(pause)
                pause = min(0.02, pause * 1.5)
        try:
            os.pwrite(self._descriptor, _MARK.pack(self._fresh() | 1), 0)
            yield
        finally:
            os.pwrite(self._descriptor, _MARK.pack(self._fresh()), 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unsettle the mark for good, so every reader asks the registry."""
        self._value = (1,)
        del self._map  # freed with its last view, which a search may still hold
        os.close(self._descriptor)
