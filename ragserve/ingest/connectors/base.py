"""The interface of folders elsewhere, and what all of them leave out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragserve.errors import TooLarge
from ragserve.files import naming
from ragserve.ingest.parsers.sniff import BEGINNING, refuse_never_text


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a listing.

    ``source`` identifies the document; ``name`` is its path within the folder; ``version`` changes with the
    content; ``size`` in bytes, if the listing says it. ``refused`` says why it cannot be read; ``left_out``
    names a kind of files that are not meant to be.
    """

    source: str
    name: str
    version: str
    size: int | None = None
    refused: str = ""
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """``file_bytes``: of one file; ``all_bytes``: of what a repository may bring; ``files``: of a listing.
    ``ocr``: images are read, too."""

    file_bytes: int
    all_bytes: int
    files: int
    ocr: bool = False


class RemoteFolder(ABC):
    """A folder elsewhere. One thread uses it. ``close`` it."""

    @abstractmethod
    def files(self) -> Iterator[RemoteFile]:
        """List all files, in a stable order. The listing is complete if no error is raised: a
        `RagserveError` says why it is not."""

    @abstractmethod
    def expect(self, files: list[RemoteFile]) -> None:
        """Say which files will be fetched, in this order, so that several may be brought at once."""

    @abstractmethod
    def fetch(self, file: RemoteFile, path: Path) -> str:
        """Write a file of the listing to ``path`` and return the version that was read. Raises
        `RagserveError`."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what it holds."""


def is_hidden(name: str) -> bool:
    """Return whether a file is hidden, or in a hidden folder, by its path within the folder."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def write_blocks(
    blocks: Iterator[bytes], path: Path, name: str, limits: Limits, check: Callable[[], None]
) -> None:
    """Write a file's content; ``check`` is called between blocks. Raises ``TooLarge``, and, by the first
    block, ``UnsupportedDocument`` for a file that is never text."""
    size = 0
    with naming(path), open(path, "wb") as out:
        for block in blocks:
            check()
            if not size:
                refuse_never_text(block[:BEGINNING], name, ocr=limits.ocr)
            size += len(block)
            if size > limits.file_bytes:
                raise too_large(size, limits)
            out.write(block)


def too_large(size: int, limits: Limits) -> TooLarge:
    """The error for a file that is larger than uploads may be."""
    limit = f"the limit is {limits.file_bytes:,} (RAGSERVE_MAX_UPLOAD_BYTES)"
    return TooLarge(f"too large: {size:,} bytes or more, {limit}")
