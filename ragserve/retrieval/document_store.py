"""The store that the settings name: every server and command opens its documents here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragserve.config import Settings

if TYPE_CHECKING:
    from ragserve_index import IndexStore


def open_store(settings: Settings) -> IndexStore:
    """Open the registry and the vector indexes. Raises the errors of `IndexStore`."""
    from ragserve_index import IndexStore

    url = settings.registry_url
    return IndexStore(
        settings.data_dir,
        index_type=settings.index_type,
        device=settings.index_device,
        registry_url=None if url is None else url.get_secret_value(),
    )
