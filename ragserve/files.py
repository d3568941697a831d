"""File helpers for all packages: atomic writes, advisory locks, and the data that comes with the project."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_RETRY_S = 0.05


def bundled(path: str) -> Path:
    """Locate a file or folder of the project by its path in the repository, e.g. ``requirements``.

    An installed wheel carries it under ``ragserve/bundled`` (see ``package-dir`` in pyproject.toml); a
    checkout, and so an editable install, has it in place.
    """
    installed = _PACKAGE / "bundled" / path
    return installed if installed.exists() else _PACKAGE.parent / path


def user_cache() -> Path:
    """The folder of what is made once for a user and can be made again: ~/.cache/ragserve, there or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragserve"


def write_text(path: Path, text: str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write UTF-8 text atomically: readers see the old file or the new one. Parent folders are made.

    With ``durable`` the file and its name are on disk when this returns. ``mode``: its permissions, less the
    umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a write that fails does not name its file
        raise
    if durable:
        sync_folder(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write ``value`` as indented JSON with a final newline, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable=durable)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, shared: bool = False, wait_s: float = 0.0, create: bool = True) -> Iterator[bool]:
    """Hold an advisory lock on the file ``path`` while the block lasts; the kernel releases it if the process
    dies.

    Yields False, and runs the block without the lock, where others kept it for ``wait_s`` seconds. Several
    processes may hold a ``shared`` lock. Raises ``FileNotFoundError`` for a missing file unless ``create``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    try:
        yield _acquire(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_s)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, kind: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_S)
        else:
            return True
