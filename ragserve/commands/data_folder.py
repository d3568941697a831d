"""The store of a data folder, for commands that need no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ragserve.config import Settings
from ragserve.errors import NotFound

if TYPE_CHECKING:
    from ragserve_index import IndexStore


@contextmanager
def open_data(settings: Settings) -> Iterator[IndexStore]:
    """Open the store of a data folder. Raises NotFound if there is none."""
    from ragserve.retrieval.document_store import open_store

    if settings.registry_url is None and not settings.data_dir.is_dir():
        hint = "Ingest something first, or give --data-dir."
        raise NotFound(f"There is no data in {settings.data_dir}.", hint=hint)
    with open_store(settings) as store:
        yield store
