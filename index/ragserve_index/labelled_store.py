"""A store as one viewer sees it, and the labels that decide about that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Self

from ragserve_index import batch as batches
from ragserve_index import job_cancellation, labelling, registry
from ragserve_index.chunk_changes import ChunkChanges
from ragserve_index.database import Database
from ragserve_index.joint_search import JointSearcher
from ragserve_index.types import Document
from ragserve_index.viewers import Viewer


class LabelledStore:
    """The part of `IndexStore` that is about viewers and labels."""

    database: Database
    _searcher: JointSearcher
    _viewer: Viewer
    _closed: bool
    chunk_changes: ChunkChanges

    @property
    def viewer(self) -> Viewer:
        """Whose store it is."""
        return self._viewer

    def seen_by(self, viewer: Viewer) -> Self:
        """The same store as a viewer sees it. Costs nothing, and need not be closed."""
        found = copy(self)
        found._viewer = viewer
        found.chunk_changes = self.chunk_changes.seen_by(viewer)
        found._closed = True
        return found

    def hides(self, namespace: str) -> bool:
        """True if the namespace has documents that the viewer does not see, or is not there, for then it may
        be one that has them."""
        return self._searcher.hides(namespace, self._viewer)

    def labels(self, namespace: str) -> list[str]:
        """The labels of the documents that the viewer sees, as far as it holds them; none of a namespace that
        does not exist."""
        with self.database.read() as connection:
            return labelling.labels_seen(connection, namespace, self._viewer)

    def hidden(self, namespace: str, names: Iterable[str]) -> set[str]:
        """Those of the ``names``, each a doc_id or a source, that are documents which the viewer does not
        see."""
        if self._viewer.labels is None:
            return set()
        ids = {name: (name, *batches.document_ids(namespace, name)) for name in names}
        with self.database.read() as connection:
            found = labelling.hidden_ids(
                connection, namespace, [i for own in ids.values() for i in own], self._viewer
            )
        return {name for name, own in ids.items() if not found.isdisjoint(own)}

    def set_labels(
        self,
        namespace: str,
        doc_ids: Sequence[str],
        *,
        add: Iterable[str] = (),
        remove: Iterable[str] = (),
        only: Iterable[str] | None = None,
        content_hash: str | None = None,
        job_id: str | None = None,
    ) -> list[Document]:
        """Add labels to documents and remove others, or with ``only`` replace those that the viewer holds.
        Returns the documents, in a version of their own, so that searches that begin later see it.
        ``content_hash``: of the texts that the labels are for.

        Raises NotFound, InvalidRequest, Forbidden for labels that the viewer does not hold, and Conflict for
        a document that has another text by now, and for a cancelled job; then nothing is changed."""
        change = labelling.change(self._viewer, add, remove, only)
        with self.database.write() as connection:
            job_cancellation.check_goes_on(connection, job_id)
            ns = registry.namespace(connection, namespace)
            return labelling.set_labels(connection, ns, doc_ids, change, self._viewer, content_hash)
