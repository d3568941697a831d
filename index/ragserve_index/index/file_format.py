"""Format of an index file: FAISS's own bytes, then a footer that identifies them and proves them whole.

    FAISS payload | footer, JSON | footer length uint32 | CRC-32 of footer and length uint32 | b"RGSVIDX1"

The footer has size and CRC-32 of the payload. Both are checked before FAISS parses a byte, because its reader
trusts lengths in the file. A file is written under a temporary name, synced and renamed, so a name always
leads to a whole file; a killed process leaves only a temporary file, which the next start removes."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ragserve.errors import Unavailable, explained
from ragserve_index.errors import is_full, storage_full
from ragserve_index.locks import file_lock

log = logging.getLogger(__name__)

FORMAT = 1
_MAGIC = b"RGSVIDX1"
_TAIL = struct.Struct("<II8s")
_BLOCK = 1 << 20
_FILE = re.compile(r"ns-(\d+)\.(faiss|words)")


class Damaged(Exception):
    """The file is not a whole index of ours; the message says why. Internal: the index is rebuilt."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Identity of a saved index: namespace, version, type; ``stamp`` is the version's random number in the
    registry.
    """

    namespace_uid: str
    version: int
    stamp: int | None
    changed: int
    index_type: str
    structure: str
    dim: int
    count: int
    payload_bytes: int = 0
    payload_crc: int = 0
    format: int = FORMAT
    state: dict[str, Any] = field(default_factory=dict)


def index_path(directory: Path, namespace_id: int) -> Path:
    """Path of a namespace's index file."""
    return directory / f"ns-{namespace_id:06d}.faiss"


def namespace_ids(directory: Path) -> set[int]:
    """Ids of the namespaces that have files."""
    found = (_FILE.fullmatch(path.name) for path in directory.glob("ns-*"))
    return {int(match[1]) for match in found if match}


class _Counted:
    """Passes writes through and keeps their size and CRC."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.crc = 0

    def __call__(self, data: bytes) -> int:
        self._file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)
        return len(data)


def write(path: Path, footer: Footer, save: Callable[[Callable[[bytes], int]], None]) -> None:
    """Write a file atomically. ``save`` receives a callable that takes the payload piece by piece. Raises
    StorageFull or Unavailable.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            counted = _Counted(file)
            save(counted)
            whole = json.dumps(
                asdict(footer) | {"payload_bytes": counted.size, "payload_crc": counted.crc}
            ).encode()
            length = struct.pack("<I", len(whole))
            file.write(whole + length + struct.pack("<I", zlib.crc32(whole + length)) + _MAGIC)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        if is_full(error):
            raise storage_full(path, error) from error
        raise Unavailable(
            f"The index file {path} cannot be written: {error}.",
            hint="Check its directory.",
            code="index_not_writable",
        ) from error
    finally:
        with suppress(OSError):  # a read-only disk refuses to remove even what is not there
            temporary.unlink()


def read_footer(path: Path, *, verify: bool = False) -> Footer | None:
    """Read the footer from the file's end; None without a file. ``verify`` checks every byte of the file.
    Raises Damaged, and Unavailable where the process has no file descriptor left.
    """
    try:
        with path.open("rb") as file:
            footer = _footer(file)
            if verify:
                _check_payload(file, footer)
            return footer
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) and (said := explained(error)):
            raise said from error
        raise Damaged(f"unreadable: {error}") from error


def _footer(file: BinaryIO) -> Footer:
    size = file.seek(0, os.SEEK_END)
    if size < _TAIL.size:
        raise Damaged(f"only {size} bytes")
    file.seek(size - _TAIL.size)
    length, crc, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic != _MAGIC:
        raise Damaged("its end is missing, or it is not an index of ours")
    if length > size - _TAIL.size:
        raise Damaged("its footer does not fit into it")
    file.seek(size - _TAIL.size - length)
    whole = file.read(length)
    if zlib.crc32(whole + struct.pack("<I", length)) != crc:
        raise Damaged("its footer fails its checksum")
    content = json.loads(whole)
    if content.get("format") != FORMAT:
        raise Damaged(f"format {content.get('format')}, this ragserve reads {FORMAT}")
    footer = Footer(**content)
    if footer.payload_bytes != size - _TAIL.size - length:
        raise Damaged(f"{size - _TAIL.size - length} bytes of index instead of {footer.payload_bytes}")
    return footer


def _check_payload(file: BinaryIO, footer: Footer) -> None:
    file.seek(0)
    crc, left = 0, footer.payload_bytes
    while left > 0:
        block = file.read(min(_BLOCK, left))
        if not block:
            raise Damaged("it was cut while being read")
        crc = zlib.crc32(block, crc)
        left -= len(block)
    if crc != footer.payload_crc:
        raise Damaged("its content fails its checksum")


def remove_leftovers(directory: Path, list_known: Callable[[], set[Path]]) -> None:
    """Remove temporary files of killed processes, and indexes of dropped namespaces. Waits for a save in
    progress.
    """
    with file_lock(directory / ".lock"):
        known = list_known()  # under the lock, so a namespace created since cannot have saved yet
        for path in [
            *directory.glob("ns-*.tmp"),
            *(p for p in directory.glob("ns-*.faiss") if p not in known),
            *(p for p in directory.glob("ns-*.words") if p.with_suffix(".faiss") not in known),
        ]:
            log.warning(
                "removing %s, left by a process that was killed or a namespace that was dropped", path
            )
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
