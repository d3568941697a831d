"""The index's own errors, beside those of ``ragserve.errors``, which imports nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ragserve.errors import InvalidRequest, RagserveError, StorageFull, Unavailable, explained


class RegistryDamaged(RagserveError):
    """The registry cannot be read. It is never repaired automatically: it is the only copy of the
    documents.
    """

    status = 500
    default_code = "registry_damaged"


class InvalidDocument(InvalidRequest):
    """A document that cannot be stored, whatever else is written with it."""


def lexical_index_damaged(path: str | Path, reason: object) -> RegistryDamaged:
    """The error for a damaged lexical index, which can be built again."""
    return RegistryDamaged(
        f"A lexical index in the registry {path} is damaged: {reason}.",
        hint="`ragserve docs check --repair` builds it again.",
        code="lexical_index_damaged",
    )


def storage_full(path: Path, error: Exception) -> StorageFull:
    """The error for a disk without room."""
    return StorageFull(
        f"No room left on the disk of {path}: {error}.",
        hint="This step was undone. Free some space, or use another --data-dir, and repeat.",
    )


def is_full(error: OSError) -> bool:
    """True if the error means no space, quota exceeded or file too large."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def short_of_descriptors(name: str) -> RagserveError | None:
    """The error where this process can open nothing, which SQLite and libpq do not tell from other
    reasons."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return explained(OSError(error.errno, error.strerror, name))
    return None


def registry_busy(name: str, waited_s: float) -> Unavailable:
    """The error for a lock that another process has kept too long."""
    return Unavailable(
        f"Another process has kept the registry {name} locked for {waited_s:.0f} s.",
        hint="Try again when its ingestion step is done.",
        code="registry_busy",
    )


def index_closed() -> Unavailable:
    """The error for a call after `close`."""
    return Unavailable("The index is closed.", code="index_closed")


def lone_surrogate(error: UnicodeEncodeError) -> InvalidDocument:
    """The error for text that is not valid Unicode."""
    shown = error.object[max(0, error.start - 10) : error.start + 10]
    return InvalidDocument(
        f"Text with a lone surrogate cannot be stored: {shown!r}.",
        hint="Decode it with errors='replace'.",
        code="invalid_text",
    )
