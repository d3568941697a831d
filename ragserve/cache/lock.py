"""The lock on a data folder's document cache, by which a command knows whether a server uses the cache.

A server with an engine holds ``engine.lock`` shared while it lives; a command that starts an engine itself,
or removes files, holds it exclusively. The kernel releases it when its holder dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ragserve.errors import Conflict
from ragserve.files import locked

_WAIT_S = 10.0


@contextmanager
def shared(data_dir: Path) -> Iterator[None]:
    """Around a server's life. Raises Conflict while a command has the cache to itself for long."""
    with locked(_lock_file(data_dir), shared=True, wait_s=_WAIT_S) as acquired:
        if not acquired:
            raise Conflict(
                f"A ragserve command has the document cache of {data_dir} to itself.",
                hint="Is `ragserve docs warm` running? Wait for it, or stop it.",
                code="cache_in_use",
            )
        yield


def alone(data_dir: Path, wait_s: float = 0.0) -> AbstractContextManager[bool]:
    """Yield True if nobody else uses the cache; nobody will while the block lasts."""
    return locked(_lock_file(data_dir), wait_s=wait_s)


def _lock_file(data_dir: Path) -> Path:
    data_dir.mkdir(parents=True, exist_ok=True)
    return data_dir / "engine.lock"
