"""Opening a data directory: which database is the registry, and what cannot be used."""

from __future__ import annotations

from pathlib import Path

from ragserve.errors import InvalidRequest, RagserveError, Unavailable, explained
from ragserve_index.database import Database
from ragserve_index.errors import is_full, storage_full
from ragserve_index.gpu import ON_GPU


def check_device(index_type: str, device: str) -> None:
    """Raises InvalidRequest for a device that is none, or that has no form of the index."""
    if device not in ("cpu", "gpu"):
        raise InvalidRequest(f"No index device {device!r}.", hint="Devices are: cpu, gpu.", param="device")
    if device == "gpu" and index_type not in ON_GPU:
        raise InvalidRequest(
            f"An index of type {index_type} has no GPU form.",
            hint=f"With device gpu the type is one of: {', '.join(ON_GPU)}.",
            param="device",
        )


def folder_error(data_dir: Path, error: OSError) -> RagserveError:
    """The error for a data directory that cannot be used."""
    if is_full(error):
        return storage_full(data_dir / "indexes", error)
    said = explained(error)
    return Unavailable(
        f"The data directory {data_dir} cannot be used: {error}.",
        hint=said.hint if said else "Use another --data-dir.",
        code="data_dir",
    )


def open_database(data_dir: Path, registry_url: str | None) -> Database:
    """The Postgres database of the URL, or the SQLite file of the data directory."""
    if registry_url is None:
        from ragserve_index.sqlite.sqlite_database import SqliteDatabase

        return SqliteDatabase(data_dir / "ragserve.sqlite3")
    from ragserve_index.postgres.postgres_database import PostgresDatabase

    return PostgresDatabase(registry_url)
