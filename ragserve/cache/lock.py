"""The lock on a data folder's document cache, by which a command knows whether a server uses the cache.

A server with an engine holds ``engine.lock`` shared while it lives; a command that starts an engine itself,
or removes files, holds it exclusively. The kernel releases it when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragserve.errors import Conflict

_WAIT_S = 10.0
_PAUSE_S = 0.05


@contextmanager
def shared(data_dir: Path) -> Iterator[None]:
    """Around a server's life. Raises Conflict while a command has the cache to itself for long."""
    with _held(data_dir, fcntl.LOCK_SH, _WAIT_S) as held:
        if not held:
            raise Conflict(
                f"A ragserve command has the document cache of {data_dir} to itself.",
                hint="Is `ragserve docs warm` running? Wait for it, or stop it.",
                code="cache_in_use",
            )
        yield


@contextmanager
def alone(data_dir: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Whether nobody else uses the cache; while the block lasts, nobody will."""
    with _held(data_dir, fcntl.LOCK_EX, wait_s) as held:
        yield held


@contextmanager
def _held(data_dir: Path, kind: int, wait_s: float) -> Iterator[bool]:
    data_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(data_dir / "engine.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(descriptor, kind, wait_s)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True
