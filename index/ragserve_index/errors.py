"""The index's own error, beside those of ``ragserve.errors``, which imports nothing."""

from __future__ import annotations

from pathlib import Path

from ragserve.errors import RagserveError


class RegistryDamaged(RagserveError):
    """SQLite cannot read the registry. It is never repaired automatically: it is the only copy of the
    documents.
    """

    status = 500
    default_code = "registry_damaged"


def lexical_index_damaged(path: Path, reason: object) -> RegistryDamaged:
    """The error for a damaged lexical index, which can be built again."""
    return RegistryDamaged(
        f"A lexical index in the registry {path} is damaged: {reason}.",
        hint="`ragserve docs check --repair` builds it again.",
        code="lexical_index_damaged",
    )
