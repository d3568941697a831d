"""Logs of JSON lines that are bounded: eight files, of which the oldest goes first. Several processes may
write to one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ragserve.errors import Unavailable
from ragserve.files import locked, naming, sync_folder, write_all

FILES = 8
_WAIT_S = 5.0
_MODE = 0o600


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace") + b"\n"  # half a character is escaped, as JSON has it


class RotatingLog:
    """``name``.jsonl in ``folder``, which only the owner may read. Before that file exceeds an eighth of
    ``max_bytes`` it becomes `name.1.jsonl`, and so on; the eighth goes. ``durable``: each line is flushed to
    disk (fsync).

    All methods but `paths` raise OSError, and Unavailable if another process keeps the log for seconds."""

    def __init__(self, folder: Path, name: str, max_bytes: int, *, durable: bool) -> None:
        self.folder = folder
        self.file_bytes = max_bytes // FILES
        self._name = name
        self._durable = durable

    @property
    def paths(self) -> list[Path]:
        """Paths of all files that there may be, newest first."""
        return [self._path(number) for number in range(FILES)]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes and threads from changing the log while the block lasts."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self.folder / ".lock", wait_s=_WAIT_S) as alone:
            if not alone:
                raise Unavailable("another process keeps the log")
            yield

    def append(self, line: bytes) -> None:
        """Append a line. Only within `alone`."""
        current = self._path(0)
        size = current.stat().st_size if current.exists() else 0
        if size and size + len(line) > self.file_bytes:
            for number in range(FILES - 2, -1, -1):
                if self._path(number).exists():
                    self._path(number).replace(self._path(number + 1))
            size = 0
        descriptor = os.open(current, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        try:
            with naming(current):
                if size and os.pread(descriptor, 1, size - 1) != b"\n":  # torn by a power cut or a full disk
                    line = b"\n" + line
                write_all(descriptor, line)
                if self._durable:
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self._durable and not size:
            sync_folder(self.folder)

    def keep_only(self, keep: Callable[[bytes], bool]) -> None:
        """Remove all other lines, for good. A file that cannot be written anew, as on a full disk, goes with
        all its lines. Only within `alone`."""
        for leftover in self.folder.glob("*.tmp"):  # of a process that was killed
            leftover.unlink()
        for path in self.paths:
            with suppress(FileNotFoundError), path.open("rb") as file:
                if all(map(keep, file)):
                    continue
                try:
                    _rewrite(path, file, keep)
                except OSError:
                    path.unlink()
        sync_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / (f"{self._name}.{number}.jsonl" if number else f"{self._name}.jsonl")


def _rewrite(path: Path, file: BinaryIO, keep: Callable[[bytes], bool]) -> None:
    """Replace a file by one with the lines to keep; without any, remove it."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=_MODE)) as new:
            file.seek(0)
            new.writelines(line for line in file if keep(line))
            size = new.tell()
            new.flush()
            os.fsync(new.fileno())
        if size:
            temporary.replace(path)
        else:
            path.unlink()
    finally:
        temporary.unlink(missing_ok=True)
