"""The index's own error, beside those of ``ragserve.errors``, which imports nothing."""

from __future__ import annotations

from ragserve.errors import RagserveError


class RegistryDamaged(RagserveError):
    """SQLite cannot read the registry. It is never repaired automatically: it is the only copy of the
    documents.
    """

    status = 500
    default_code = "registry_damaged"
