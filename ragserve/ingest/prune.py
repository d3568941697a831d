"""Documents whose file is gone from a directory that was ingested."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ragserve.errors import Forbidden, NotFound
from ragserve.ingest.jobs.job_report import Interrupted
from ragserve.ingest.jobs.lease import JobRun
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.sources import matches
from ragserve_index import IndexStore, JobStore
from ragserve_index.attached_documents import PARENT
from ragserve_index.types import Document, Job, JobItem

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


def _is_gone(path: str) -> bool:
    """Return whether a real path leads nowhere or has become a link. One that cannot be looked at is there:
    its disk or the rights of a folder may come back."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return os.path.realpath(path) != path


def _has_files(folder: str) -> bool:
    """Return whether a folder has a file, at any depth. Hidden ones do not count."""
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(not name.startswith(".") for name in files):
            return True
    return False


def _vanished(store: IndexStore, job: Job, root: str, unread: Container[str]) -> list[Document]:
    """Find documents under ``root`` whose file is gone and that a scan with the job's options would otherwise
    find. ``unread``: paths below which the scan could not look.

    A file that was replaced by a symbolic link is gone: its target is another document. Raises NotFound."""
    prefix, recursive, globs = os.path.join(root, ""), job.spec["recursive"], job.spec["globs"]
    gone = []
    for document in every_document(store, job.namespace, source_prefix=prefix):
        if not document.source.startswith(prefix):
            continue  # of a directory whose name is in another Unicode form
        relative = document.source.removeprefix(prefix)
        within = (recursive or os.sep not in relative) and matches(relative, globs)
        if within and not is_attachment(document) and _is_gone(document.source):
            gone.append(document)
    return [one for one in gone if not any(str(above) in unread for above in Path(one.source).parents)]


def _vanished_of(
    store: IndexStore, jobs: JobStore, run: JobRun, record: Callable[[Sequence[JobItem]], None]
) -> list[Document]:
    """Find the vanished documents of a job's roots. A root that is missing or, if the job removes them,
    without any file is taken for a disk that is not mounted: nothing is removed, and the latter fails."""
    unread = {item.source for item in jobs.items(run.job.job_id, "failed")}
    gone: dict[str, Document] = {}
    for root in filter(os.path.isdir, run.job.spec.get("roots", ())):
        try:
            found = _vanished(store, run.job, root, unread)
        except NotFound:  # nothing was ever indexed in this namespace
            return []
        if found and run.job.spec.get("prune") and not _has_files(root):
            reason = (
                f"no file is in it, as in a disk that is not mounted: its {len(found):,} documents stay "
                "(ragserve docs rm removes them)"
            )
            run.progress.total += 1
            run.progress.failed += 1
            record([JobItem(root, "failed", reason, 0, 0, 0, None)])
            continue
        gone |= {document.doc_id: document for document in found}
    return list(gone.values())


def prune(
    store: IndexStore,
    jobs: JobStore,
    run: JobRun,
    elsewhere: Sequence[Document],
    record: Callable[[Sequence[JobItem]], None],
) -> tuple[str, ...]:
    """Find documents whose file vanished from the folders of a job, and remove them if the job says so;
    returns their sources. ``elsewhere``: those of folders that are not of this machine. Each becomes an item
    of the job when it is removed, so that what an interruption leaves is found by the next run. Raises
    ``Interrupted``."""
    job, spec = run.job, run.job.spec
    gone = [*elsewhere, *_vanished_of(store, jobs, run, record)]
    if spec.get("prune") and gone:
        seen = store.seen_by(Submitter.of(job).viewer)
        for document in gone:
            if run.should_stop():
                raise Interrupted
            try:
                with suppress(NotFound):  # removed by somebody else meanwhile
                    seen.remove_document(job.namespace, document.doc_id)
            except Forbidden as error:
                run.progress.failed += 1
                record([JobItem(document.source, "failed", str(error), 0, 0, 0, document.doc_id)])
            else:
                run.progress.removed += 1
                record([JobItem(document.source, "removed", None, 0, 0, 0, document.doc_id)])
    return tuple(document.source for document in gone)
