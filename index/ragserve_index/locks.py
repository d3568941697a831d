"""Locks: many readers or one writer within a process, and one saver among processes."""

from __future__ import annotations

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


class ReadWriteLock:
    """Any number of readers, or one writer. A waiting writer holds back new readers, so it cannot starve. Not
    reentrant.

    A reader announces itself and then looks for a writer; a writer announces itself and then waits for the
    readers to leave. List appends and pops are atomic, so one of the two always sees the other, and a reader
    without a writer about pays a tenth of what locks cost."""

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
    """Exclusive among processes and threads; the kernel frees it when its holder dies. Waits without a limit:
    holders only write a file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(
            descriptor, fcntl.LOCK_UN
        )  # closing alone leaves it locked when a fork has a copy of the descriptor
        os.close(descriptor)


class CommitMark:
    """Eight bytes shared by all processes that say, to anyone who looks, whether something was committed
    since. Looking costs 50 ns.

    Asking SQLite costs two system calls and evicts enough of the caches to slow the FAISS search behind it by
    a twentieth. So every writer sets the mark to a fresh odd number before it commits and to a fresh even one
    after; a file lock keeps writers apart meanwhile. A reader that saw an even mark, then asked SQLite, need
    not ask again while the mark is the same. A writer killed in between leaves an odd mark, and then readers
    ask every time, until the next write."""

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
        """The mark, or None while a commit is under way or its writer died."""
        value = self._value[0]
        return None if value & 1 else value

    def is_still(self, mark: int) -> bool:
        return self._value[0] == mark

    @contextmanager
    def changing(self, timeout_s: float) -> Iterator[None]:
        """Around a write transaction. Raises TimeoutError when another process stays in one for ``timeout_s``
        seconds.
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
        """From here on it is never settled, so whoever looks goes on to ask the registry."""
        self._value = (1,)  # the map goes with its last view, which a search of another thread may still hold
        os.close(self._descriptor)


_MARK = struct.Struct("=Q")
