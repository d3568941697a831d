"""Documents whose file is gone from a directory that was ingested."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ragserve.errors import NotFound
from ragserve.ingest.sources import matches
from ragserve_index import IndexStore
from ragserve_index.attached_documents import PARENT
from ragserve_index.types import Document

_PAGE = 1000


def every_document(
    store: IndexStore, namespace: str, *, source_prefix: str | None = None
) -> Iterator[Document]:
    """Iterate over a namespace's documents in order of doc_id, one page at a time."""
    after: str | None = None
    while True:
        page = store.documents(namespace, limit=_PAGE, after=after, source_prefix=source_prefix)
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1].doc_id


def vanished_documents(
    store: IndexStore, namespace: str, roots: Sequence[str], *, recursive: bool, globs: Sequence[str]
) -> list[Document]:
    """Find documents under ``roots`` whose file is gone and that a scan with these options would otherwise
    find.

    A file that was replaced by a symbolic link is gone: its target is another document. A missing root is
    treated as an unmounted disk, not as a deletion.
    """
    gone: dict[str, Document] = {}
    for root in filter(os.path.isdir, roots):
        prefix = os.path.join(root, "")
        try:
            for document in every_document(store, namespace, source_prefix=prefix):
                if not document.source.startswith(prefix):
                    continue  # of a directory whose name is in another Unicode form
                if document.source.startswith(f"{document.metadata.get(PARENT)}/"):
                    continue  # an attachment, which goes with its message
                relative = document.source.removeprefix(prefix)
                within = (recursive or os.sep not in relative) and matches(relative, globs)
                # sources are real paths: one that has become a link leads to another document, or out
                if within and (
                    not os.path.lexists(document.source)
                    or os.path.realpath(document.source) != document.source
                ):
                    gone[document.doc_id] = document
        except NotFound:  # nothing was ever indexed in this namespace
            return []
    return list(gone.values())
