"""The documents of a job on their way into the index. A job ends with its namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragserve.errors import Conflict, NotFound
from ragserve.ingest.chunk_editor import ChunkEditor
from ragserve.ingest.jobs.job_report import Interrupted
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.pipeline import Written
from ragserve_index import IndexStore, JobStore
from ragserve_index.types import Job


class JobWriter:
    """Writes for one job, as its submitter."""

    def __init__(self, store: IndexStore, jobs: JobStore, editor: ChunkEditor, job: Job) -> None:
        self._store = store.seen_by(Submitter.of(job).viewer)
        self._jobs, self._editor = jobs, editor
        self._job_id, self._namespace = job.job_id, job.namespace

    def write(self, batch: Sequence[Any], embedder: str) -> list[Written]:
        """Write a batch of `IndexStore.replace_documents`. Raises ``Interrupted`` if the job is cancelled, as
        all are with their namespace: it must not come back with the later documents alone, or another
        namespace of the name get them."""
        try:
            return self._write(batch, embedder)
        except (Conflict, NotFound) as error:
            if self._jobs.cancel_requested(self._job_id):
                raise Interrupted from error
            raise

    def _write(self, batch: Sequence[Any], embedder: str) -> list[Written]:
        (dim,) = {vectors.shape[1] for _, _, vectors in batch}
        self._store.ensure_namespace(self._namespace, embedder=embedder, dim=dim, job_id=self._job_id)
        if self._jobs.cancel_requested(self._job_id):
            raise Interrupted
        titles = {document.source: document.title for document, *_ in batch}
        for source in self._store.hidden(self._namespace, titles):  # an attachment's, which is refused below
            del titles[source]
        notes = self._editor.prepare(self._namespace, titles)
        written = self._store.replace_documents(self._namespace, batch, job_id=self._job_id)
        return [Written(d.doc_id, note) for d, note in zip(written, notes(written), strict=True)]
