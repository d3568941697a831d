"""Uploads on disk until their job ends: ``data_dir/uploads/<spool id>/``, durable before the job that names
them exists.

A spool is locked while it is written, so that `Spool.clean` in another process can tell it from one whose
writer died.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ragserve.errors import NotFound, StorageFull, TooLarge, Unavailable
from ragserve.files import locked, sync_folder, write_json

_BLOCK = 1 << 20  # bytes


@contextmanager
def unusable_disk_explained(where: Path) -> Iterator[None]:
    """Raise ``StorageFull`` for a full disk, or an exhausted quota, ``Unavailable`` for a read-only one: that
    of the file that the error names, else that of ``where``."""
    try:
        yield
    except OSError as error:
        disk = f"disk of {error.filename or where}"
        if error.errno == errno.EROFS:
            hint = "Make it writable and run the same ingestion again: it skips what is already indexed."
            raise Unavailable(f"The {disk} is read-only.", hint=hint) from error
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        hint = "Free some and run the same ingestion again: it skips what is already indexed."
        raise StorageFull(f"No space left on the {disk}.", hint=hint) from error


@dataclass(frozen=True, slots=True)
class SpooledFile:
    """An upload. ``stored`` names its bytes in the spool; inline text names its ``parser``. ``failed``: why
    it cannot be used; nothing is stored then."""

    source: str
    stored: str
    filename: str
    title: str = ""
    parser: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    labels: list[str] | None = None
    failed: str = ""


class SpoolWriter:
    """Collects the files of a new spool; see `Spool.writing`."""

    def __init__(self, folder: Path) -> None:
        self.id = folder.name
        self._folder = folder
        self._files: list[SpooledFile] = []

    def add(self, file: SpooledFile, stream: BinaryIO, *, max_bytes: int) -> None:
        """Copy ``stream`` to its end under a name chosen here. Raises ``TooLarge`` past ``max_bytes``."""
        stored = f"{len(self._files):05d}.bin"
        size = 0
        with open(self._folder / stored, "wb") as copy:
            while block := stream.read(_BLOCK):
                size += len(block)
                if size > max_bytes:
                    hint = "Raise RAGSERVE_MAX_UPLOAD_BYTES or split it."
                    raise TooLarge(f"{file.source!r} is larger than {max_bytes:,} bytes.", hint=hint)
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
        self._files.append(replace(file, stored=stored))

    def add_failed(self, source: str, reason: str) -> None:
        """Note something that cannot be used, for the job's report."""
        self._files.append(SpooledFile(source, "", source, failed=reason))

    def seal(self) -> None:
        """Write the manifest and make the spool durable."""
        write_json(self._folder / "manifest.json", [asdict(file) for file in self._files], durable=True)
        sync_folder(self._folder.parent)


class Spool:
    """The uploads folder of a data directory. Safe for several processes."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "uploads"

    @contextmanager
    def writing(self) -> Iterator[SpoolWriter]:
        """Make a spool; it is removed if the block raises. Create the job within the block, after ``seal``.

        Raises ``StorageFull``, and ``Unavailable`` for a read-only disk.
        """
        folder = self.root / secrets.token_hex(12)
        try:
            with unusable_disk_explained(self.root):
                folder.mkdir(parents=True)
                with locked(folder / "lock"):
                    yield SpoolWriter(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def files(self, spool_id: str) -> list[SpooledFile]:
        """List the spool's files. Raises ``NotFound`` if something else removed it."""
        try:
            manifest = (self.folder(spool_id) / "manifest.json").read_text(encoding="utf-8")
        except FileNotFoundError as error:
            message = "The uploaded files of this job are gone from the disk."
            raise NotFound(message, hint="Upload them again.") from error
        return [SpooledFile(**fields) for fields in json.loads(manifest)]

    def folder(self, spool_id: str) -> Path:
        """The folder of a spool."""
        return self.root / spool_id

    def remove(self, spool_id: str) -> None:
        """Remove a spool, if it is there."""
        shutil.rmtree(self.folder(spool_id), ignore_errors=True)

    def clean(self, in_use: Callable[[], set[str]]) -> int:
        """Remove spools that no job needs and return their number.

        ``in_use`` is called after each lock is acquired, so that a job created in the meantime is seen.
        """
        removed = 0
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            try:
                with locked(folder / "lock", create=False) as acquired:  # else it is being written
                    if acquired and folder.name not in in_use():
                        shutil.rmtree(folder, ignore_errors=True)
                        removed += 1
            except (FileNotFoundError, NotADirectoryError):
                continue  # being removed by another process, or not a spool
        return removed
