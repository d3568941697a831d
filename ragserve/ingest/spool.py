"""Uploads on disk until their job ends: data_dir/uploads/<spool id>/, complete and fsynced before the job
that names them exists.

A spool is locked while it is written, so that `clean` in another process can tell one in the making from one
whose writer died."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ragserve.errors import NotFound, StorageFull, TooLarge

__all__ = ["Spool", "SpoolWriter", "SpooledFile", "is_disk_full", "storage_full"]

_BLOCK = 1 << 20  # bytes


def is_disk_full(error: OSError) -> bool:
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def storage_full(where: Path) -> StorageFull:
    return StorageFull(
        f"No space left on the disk of {where}.",
        hint="Free some and run the same ingestion again: what is indexed already is skipped.",
    )


@dataclass(frozen=True, slots=True)
class SpooledFile:
    """One upload. ``stored`` is our own name of its bytes within the spool; ``parser`` is given for inline
    text, which is not sniffed.
    """

    source: str
    stored: str
    filename: str
    title: str = ""
    parser: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class SpoolWriter:
    """Collects files; `Spool.writing` makes and seals it."""

    def __init__(self, folder: Path) -> None:
        self.id = folder.name
        self._folder = folder
        self._files: list[SpooledFile] = []

    def add(self, file: SpooledFile, stream: BinaryIO, *, max_bytes: int) -> None:
        """Copy ``stream`` to its end; ``file.stored`` is chosen here. Raises ``TooLarge`` past ``max_bytes``."""
        stored = f"{len(self._files):05d}.bin"
        size = 0
        with open(self._folder / stored, "wb") as copy:
            while block := stream.read(_BLOCK):
                size += len(block)
                if size > max_bytes:
                    raise TooLarge(
                        f"{file.source!r} is larger than {max_bytes:,} bytes.",
                        hint="Raise RAGSERVE_MAX_UPLOAD_BYTES or split it.",
                    )
                copy.write(block)
            _sync(copy)
        self._files.append(replace(file, stored=stored))

    def seal(self) -> None:
        """Write the manifest and make all of it durable."""
        with open(self._folder / "manifest.json", "w", encoding="utf-8") as file:
            json.dump([asdict(one) for one in self._files], file)
            _sync(file)
        for folder in (self._folder, self._folder.parent):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class Spool:
    """The uploads folder of a data directory. Safe for several processes."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "uploads"

    @contextmanager
    def writing(self) -> Iterator[SpoolWriter]:
        """A new spool; removed if the block raises. Create the job within the block, after ``seal``. Raises
        ``StorageFull``.
        """
        folder = self.root / secrets.token_hex(12)
        try:
            folder.mkdir(parents=True)
            with open(folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield SpoolWriter(folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and is_disk_full(error):
                raise storage_full(self.root) from error
            raise

    def files(self, spool_id: str) -> list[SpooledFile]:
        """What the spool holds. Raises ``NotFound`` where it was removed from outside."""
        try:
            manifest = (self.folder(spool_id) / "manifest.json").read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise NotFound(
                "The uploaded files of this job are gone from the disk.", hint="Upload them again."
            ) from error
        return [SpooledFile(**one) for one in json.loads(manifest)]

    def folder(self, spool_id: str) -> Path:
        return self.root / spool_id

    def remove(self, spool_id: str) -> None:
        shutil.rmtree(self.folder(spool_id), ignore_errors=True)

    def clean(self, in_use: Callable[[], set[str]]) -> int:
        """Remove spools that no job needs; how many. ``in_use`` is asked after each lock is held, so a job
        made meanwhile is seen.
        """
        removed = 0
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            try:
                with open(folder / "lock") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if folder.name not in in_use():
                        shutil.rmtree(folder, ignore_errors=True)
                        removed += 1
            except (BlockingIOError, FileNotFoundError, NotADirectoryError):
                continue  # being written now, being removed by another process, or nothing of ours
        return removed


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
