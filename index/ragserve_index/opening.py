"""Which database is the registry."""

from __future__ import annotations

from pathlib import Path

from ragserve_index.database import Database


def open_database(data_dir: Path, registry_url: str | None) -> Database:
    """The Postgres database of the URL, or the SQLite file of the data directory."""
    if registry_url is None:
        from ragserve_index.sqlite.sqlite_database import SqliteDatabase

        return SqliteDatabase(data_dir / "ragserve.sqlite3")
    from ragserve_index.postgres.postgres_database import PostgresDatabase

    return PostgresDatabase(registry_url)
