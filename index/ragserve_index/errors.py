"""Errors of the index: those of ``ragserve.errors``, which imports nothing, and one of its own."""

from __future__ import annotations

from ragserve.errors import Conflict, InvalidRequest, NotFound, RagserveError, StorageFull, Unavailable

__all__ = [
    "Conflict",
    "InvalidRequest",
    "NotFound",
    "RagserveError",
    "RegistryDamaged",
    "StorageFull",
    "Unavailable",
]


class RegistryDamaged(RagserveError):
    """SQLite cannot read the registry. It is never repaired automatically: it is the only copy of the
    documents.
    """

    status = 500
    default_code = "registry_damaged"
