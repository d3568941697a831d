"""The folders elsewhere that a job names: their listings, what is unchanged in them, what has vanished."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ragserve.config import Settings
from ragserve.errors import NotFound, RagserveError, Unavailable
from ragserve.ingest.connectors.base import Limits, RemoteFile, RemoteFolder, is_hidden
from ragserve.ingest.connectors.git_folder import GitFolder
from ragserve.ingest.connectors.s3_folder import S3Folder
from ragserve.ingest.connectors.source_addresses import Address, S3Address, is_elsewhere, parse_address
from ragserve.ingest.jobs.job_report import Interrupted
from ragserve.ingest.jobs.lease import JobRun
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.parsers.base import left_out
from ragserve.ingest.prune import every_document, is_attachment
from ragserve.ingest.sources import matches
from ragserve_index import IndexStore, JobStore
from ragserve_index.text_forms import normal, storable
from ragserve_index.types import Document, JobItem

log = logging.getLogger(__name__)
IsCurrent = Callable[[Document, str], bool]
Record = Callable[[Sequence[JobItem]], None]


class JobFolders:
    """What the files of a job's folders elsewhere are. One thread uses it at a time. Close it.

    Args:
        store: Has the documents that are known; those that the job's submitter does not see count as none.
        run: The job's run.
        where: A folder for clones, which the caller removes.
        limits: Of files and listings.
    """

    def __init__(self, store: IndexStore, run: JobRun, where: Path, limits: Limits) -> None:
        self._store = store.seen_by(Submitter.of(run.job).viewer)
        self._run = run
        self._where = where
        self._limits = limits
        self._globs: Sequence[str] = run.job.spec.get("globs", ())
        self._opened: list[RemoteFolder] = []
        self._files: dict[str, tuple[RemoteFolder, RemoteFile]] = {}
        self._vanished: dict[str, Document] = {}
        self._unchanged: set[str] = set()
        given = filter(is_elsewhere, run.job.spec.get("inputs", ()))
        self._addresses = list(dict.fromkeys(map(parse_address, given)))  # one may be given in two forms

    def close(self) -> None:
        """Close all folders."""
        for folder in self._opened:
            folder.close()

    def read_listings(self, jobs: JobStore, is_current: IsCurrent, record: Record) -> None:
        """List the folders and add what is new or changed in them to the job's sources.

        ``is_current(document, version)`` tells whether a document was made of this version of its file.
        Unchanged files are counted, and become items only in a job that warms them. Raises
        ``Interrupted``."""
        for address in self._addresses:
            if self._run.should_stop():
                raise Interrupted
            try:
                self._list(address, jobs, is_current, record)
            except Exception as error:  # as with sitemaps: this source's failure
                if self._run.should_stop():
                    raise Interrupted from error
                if not isinstance(error, RagserveError):
                    if isinstance(error, OSError):  # this machine's disk
                        raise
                    log.exception("Listing %s failed", address)
                self._settle(jobs, str(address), "failed", str(error), record)

    def vanished(self) -> list[Document]:
        """Documents of the folders whose listing is complete, and names their files no more."""
        return list(self._vanished.values())

    def expect(self, pending: Sequence[str]) -> None:
        """Say which files will be fetched, in this order."""
        for folder in self._opened:
            folder.expect([file for own, file in map(self._found, pending) if own is folder and file])

    def fetch(self, source: str, path: Path) -> tuple[RemoteFile, str]:
        """Write a file to ``path``; returns it, and the version that was read. Raises `RagserveError`."""
        folder, file = self._found(source)
        if folder is None or file is None:
            raise NotFound("removed since the job was begun")
        if file.refused:
            raise Unavailable(file.refused, code="refused")
        return file, folder.fetch(file, path)

    def _found(self, source: str) -> tuple[RemoteFolder | None, RemoteFile | None]:
        return self._files.get(source, (None, None))

    def _list(self, address: Address, jobs: JobStore, is_current: IsCurrent, record: Record) -> None:
        known = {normal(document.source): document for document in self._known(address)}
        folder = self._open(address)
        found, names, others = list[RemoteFile](), set[str](), Counter[str]()
        for file in folder.files():
            if kind := file.left_out or ("hidden files" if is_hidden(file.name) else ""):
                others[kind] += 1
            elif matches(file.name, self._globs):
                found.append(_once(file, names))
        changed, unchanged = list[str](), list[str]()
        for file in found:
            document = known.get(normal(file.source))
            if document is not None and not file.refused and is_current(document, file.version):
                unchanged.append(file.source)
            elif file.source not in self._files:
                self._files[file.source] = folder, file
                changed.append(file.source)
        self._vanished |= {
            document.doc_id: document
            for source, document in known.items()
            if source not in names and self._would_be_found(address, document)
        }
        self._count(jobs, changed, unchanged, record)
        own = str(address)
        if own in unchanged:
            self._settle(jobs, own, "unchanged", None, record)
        elif own not in self._files:  # the address of a file is the file's own item
            said = f"a folder: {len(found):,} files, {len(changed):,} new or changed"
            self._settle(jobs, own, "skipped", "; ".join(filter(None, (said, left_out(others)))), record)

    def _count(self, jobs: JobStore, changed: list[str], unchanged: list[str], record: Record) -> None:
        progress, job_id = self._run.progress, self._run.job.job_id
        known = {item.source for item in jobs.items(job_id)}
        counted = known | self._unchanged  # folders may overlap
        new = [source for source in unchanged if source not in counted]
        self._unchanged.update(new)
        if self._run.job.spec.get("warm"):
            jobs.add_items(job_id, new)
            record([JobItem(source, "unchanged", None, 0, 0, 0, None) for source in new])
        jobs.add_items(job_id, changed)
        progress.unchanged += len(new)
        progress.total += len(new) + len(set(changed) - known)
        self._run.notify()

    def _settle(self, jobs: JobStore, address: str, state: str, reason: str | None, record: Record) -> None:
        """Record the outcome of an address's own item, unless an earlier run of the job did."""
        pending = {item.source for item in jobs.items(self._run.job.job_id, "pending")}
        if address in pending:
            progress = self._run.progress
            setattr(progress, state, getattr(progress, state) + 1)
            record([JobItem(address, state, reason, 0, 0, 0, None)])

    def _open(self, address: Address) -> RemoteFolder:
        folder: RemoteFolder
        if isinstance(address, S3Address):
            folder = S3Folder(address, self._limits, self._run.should_stop)
        else:
            clone = self._where / f"clone-{len(self._opened)}"
            clone.mkdir()
            folder = GitFolder(address, clone, self._limits, self._run.should_stop)
        self._opened.append(folder)
        return folder

    def _known(self, address: Address) -> Iterator[Document]:
        """The documents of the folder, and of the file that its address may be."""
        try:
            for document in every_document(self._store, self._run.job.namespace, source_prefix=str(address)):
                if document.source == str(address) or document.source.startswith(_below(address)):
                    yield document
        except NotFound:  # nothing was ever indexed in this namespace
            return

    def _would_be_found(self, address: Address, document: Document) -> bool:
        """Whether a complete listing would have named the document's file. A folder's address, found again
        as a file's, is none."""
        if not document.source.startswith(_below(address)) or is_attachment(document):
            return False
        name = document.source.removeprefix(_below(address))
        return not is_hidden(name) and matches(name, self._globs)


def _below(address: Address) -> str:
    """What the sources of files in a folder begin with."""
    return f"{address}/" if address.folder else address.container


def _once(file: RemoteFile, names: set[str]) -> RemoteFile:
    """The file, refused where its name cannot be stored, or is another's in another form of Unicode."""
    source, refused = storable(file.source), file.refused
    if source != file.source:
        refused = refused or "its name has characters that cannot be stored (rename it)"
    elif not refused and normal(source) in names:
        refused = "its name differs from another's only in the Unicode form of accents (rename one)"
    names.add(normal(source))
    return RemoteFile(source, file.name, file.version, file.size, refused)


@contextmanager
def folders_of(settings: Settings, store: IndexStore, run: JobRun, downloads: Path) -> Iterator[JobFolders]:
    """The folders of a job, closed at the end of the block; ``downloads`` is a folder that the caller
    removes."""
    file_bytes = int(run.job.spec.get("max_bytes") or settings.max_upload_bytes)
    limits = Limits(file_bytes, settings.source_bytes, settings.source_files, settings.ocr == "docling")
    folders = JobFolders(store, run, downloads, limits)
    try:
        yield folders
    finally:
        folders.close()
