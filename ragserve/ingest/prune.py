"""Documents whose file is gone from a directory that was ingested."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ragserve.errors import Forbidden, NotFound
from ragserve.ingest.jobs.lease import JobRun
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.sources import matches
from ragserve_index import IndexStore, JobStore
from ragserve_index.attached_documents import PARENT
from ragserve_index.types import Document, JobItem

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


def is_attachment(document: Document) -> bool:
    """Return whether a document came with a message, with which it goes."""
    return document.source.startswith(f"{document.metadata.get(PARENT)}/")


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
                if is_attachment(document):
                    continue
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


def prune(
    store: IndexStore,
    jobs: JobStore,
    run: JobRun,
    elsewhere: Sequence[Document],
    record: Callable[[Sequence[JobItem]], None],
) -> tuple[str, ...]:
    """Find documents whose file vanished from the folders of a job, and remove them if the job says so;
    returns their sources. ``elsewhere``: those of folders that are not of this machine."""
    job, spec = run.job, run.job.spec
    gone = list(elsewhere)
    if spec.get("roots"):
        gone += vanished_documents(
            store, job.namespace, spec["roots"], recursive=spec["recursive"], globs=spec["globs"]
        )
    if spec.get("prune") and gone:
        seen, items = store.seen_by(Submitter.of(job).viewer), list[JobItem]()
        jobs.add_items(job.job_id, [document.source for document in gone])
        for document in gone:
            try:
                with suppress(NotFound):  # removed by somebody else meanwhile
                    seen.remove_document(job.namespace, document.doc_id)
            except Forbidden as error:
                run.progress.failed += 1
                items.append(JobItem(document.source, "failed", str(error), 0, 0, 0, document.doc_id))
            else:
                run.progress.removed += 1
                items.append(JobItem(document.source, "removed", None, 0, 0, 0, document.doc_id))
        record(items)
    return tuple(document.source for document in gone)
