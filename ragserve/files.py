"""File helpers for all packages: atomic writes, advisory locks, and the data that comes with the project."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_RETRY_S = 0.05
_UNLOCKED, _IN_USE = ".ragserve-", "lock"
_LONGEST = 60  # bytes: the name of a socket has 107, and those in our folder take up to 40 of them


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of the block name the file ``path``, as that of a write that fails does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write ``data`` to an open file, by one call where there is room."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_text(path: Path, text: str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write UTF-8 text atomically: readers see the old file or the new one. Parent folders are made. A link
    stays one: its file is replaced.

    With ``durable`` the file and its name are on disk when this returns. ``mode``: its permissions, less the
    umask.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with naming(path):
        try:
            with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
                file.write(text)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durable:
        sync_folder(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write ``value`` as indented JSON with a final newline, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable=durable, mode=mode)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
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


@contextmanager
def scratch_folder(place: Path, prefix: str) -> Iterator[Path]:
    """Make a folder in ``place`` whose name begins with ``prefix``, and remove it at the end; and remove
    those that killed processes of this user have left there."""
    for left in place.glob(f"{prefix}*"):
        with suppress(OSError):  # another's, or just removed
            if left.lstat().st_uid == os.geteuid():
                with locked(left / _IN_USE, create=False) as unused:
                    if unused:
                        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=place))
    try:
        with locked(folder / _IN_USE):
            folder = folder.rename(place / f"{prefix}{folder.name.removeprefix(_UNLOCKED)}")
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def temporary_folder(*, sockets: bool = True) -> Iterator[Path]:
    """Put the temporary files and sockets of this process, while the block lasts, into a `scratch_folder`.

    It is in the system's folder for temporary files; in /tmp if ``sockets``, as an engine has them, could
    have no name there."""
    place = tempfile.gettempdir()
    if sockets and len(os.fsencode(place)) > _LONGEST:
        place = "/tmp"
    before = tempfile.tempdir
    shared = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with scratch_folder(Path(place), "ragserve-run-") as folder:
        tempfile.tempdir = str(folder)
        shared.setdefault("tempdir", str(folder))  # else it makes one, and complains at exit that it is gone
        try:
            yield folder
        finally:
            tempfile.tempdir = before
            if shared["tempdir"] == str(folder):
                del shared["tempdir"]
