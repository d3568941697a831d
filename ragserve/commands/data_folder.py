"""The store of a data folder, for commands that need no server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ragserve.config import Settings
from ragserve.errors import NotFound

if TYPE_CHECKING:
    from ragserve_index import IndexStore
    from ragserve_index.types import Document


@contextmanager
def open_data(settings: Settings) -> Iterator[IndexStore]:
    """Open the store of a data folder. Raises NotFound if there is none."""
    from ragserve.retrieval.document_store import open_store

    if settings.registry_url is None and not settings.data_dir.is_dir():
        hint = "Ingest something first, or give --data-dir."
        raise NotFound(f"There is no data in {settings.data_dir}.", hint=hint)
    with open_store(settings) as store:
        yield store


def resolve(store: IndexStore, namespace: str, name: str) -> Document:
    """Find a document by doc_id, by source, or by a path that leads to the source. Raises NotFound."""
    store.namespace(namespace)  # must exist
    with suppress(NotFound):
        return store.document(namespace, name)
    for source in (name, os.path.realpath(os.path.expanduser(name))):
        if (found := store.find_source(namespace, source)) is not None:
            return found
    message = f"No document {name!r} in namespace {namespace!r}."
    raise NotFound(message, hint="See `ragserve docs ls`.", code="document_not_found")
