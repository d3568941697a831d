"""The index's errors: ragserve's tree, and one of its own. ``ragserve.errors`` imports nothing, so this
closes no import cycle.
"""

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
    """SQLite cannot read the registry. Nothing of it is repaired on its own: it is the only copy of the
    documents.
    """

    status = 500
    default_code = "registry_damaged"
