"""Turn a job's source into a request for the parsing process: the file, its known hash, its metadata."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.errors import Conflict, InvalidRequest, NotFound, RagserveError
from ragserve.ingest.connectors.folders_of_a_job import JobFolders
from ragserve.ingest.connectors.source_addresses import is_elsewhere
from ragserve.ingest.fetch import Fetcher
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.parsing.parse_process import Failed, ParseRequest
from ragserve.ingest.parsing.parse_worker import version_hash
from ragserve.ingest.pipeline import content_salt
from ragserve.ingest.planned import PlannedFile
from ragserve.ingest.sources import is_url
from ragserve.ingest.spool import Spool
from ragserve_index import IndexStore
from ragserve_index.types import Document, Job

_HIDDEN = "there is a document of this name with labels that the API key does not hold: use another name"
log = logging.getLogger(__name__)


class FilePlanner:
    """Plans the files of one job, on one thread. Downloads go to the folder ``downloads``, one at a time.

    ``tokenizer`` is the fingerprint of the tokenizer that cuts the chunks.
    """

    def __init__(
        self,
        settings: Settings,
        store: IndexStore,
        spool: Spool,
        job: Job,
        tokenizer: str,
        downloads: Path,
        fetcher: Fetcher,
        folders: JobFolders,
    ) -> None:
        self._settings = settings
        self._namespace, self._job_id = job.namespace, job.job_id
        self._tokenizer = tokenizer
        self._downloads = downloads
        self._fetcher = fetcher
        self._seen = store.seen_by(Submitter.of(job).viewer)
        self._folders = folders
        self._metadata: Mapping[str, Any] = job.spec.get("metadata", {})
        self._labels: Sequence[str] | None = job.spec.get("labels")
        self._named = frozenset(job.spec.get("named", ()))
        self._spool_folder: Path | None = None
        if "spool" in job.spec:
            self._spool_folder = spool.folder(job.spec["spool"])
            self._spooled = {file.source: file for file in spool.files(job.spec["spool"])}

    def plan(self, source: str) -> PlannedFile:
        """Plan one source, as a failure if it cannot be fetched, or would replace a document that the job's
        submitter does not see. Changes nothing of that document. Raises ``OSError`` on a full disk."""
        if self._seen.hidden(self._namespace, [source]):
            return PlannedFile(source, Failed(_HIDDEN, "label_not_held"))
        if self._spool_folder is not None:
            return self._upload(source, self._spool_folder)
        if is_url(source):
            return self._fetched(source, self._download)
        if is_elsewhere(source):
            return self._fetched(source, self._from_folder)
        metadata = {"path": source, **self._metadata}
        name, found = os.path.basename(source), source not in self._named
        return self._planned(source, source, name, metadata, found=found, labels=self._labels)

    def _upload(self, source: str, folder: Path) -> PlannedFile:
        file = self._spooled.get(source)
        if file is None:
            return PlannedFile(source, Failed("not among the uploaded files", "unreadable"))
        if file.failed:
            return PlannedFile(source, Failed(file.failed, "unusable"))
        path, metadata = str(folder / file.stored), {"path": source, **file.metadata}
        return self._planned(
            source,
            path,
            file.filename,
            metadata,
            labels=file.labels,  # each has its own; those of the job are all of them together
            title=file.title,
            parser=file.parser,
        )

    def is_current(self, document: Document, version: str) -> bool:
        """Return whether a document was made of this version of its file elsewhere, as a job like this one
        makes it. It then has the job's labels from now on."""
        salt = self._salt("", {"path": document.source, **self._metadata})
        if document.content_hash != version_hash(version, salt):
            return False
        try:
            self._label(document, None if self._labels is None else tuple(self._labels))
        except (Conflict, InvalidRequest, NotFound):  # replaced meanwhile, or too many: a failure of its own
            return False
        return True

    def relabel(self, file: PlannedFile) -> None:
        """Give the document of a file that was found unchanged, and its attachments, the labels that come
        with the file. Raises ``NotFound`` or ``Conflict`` if it was removed or replaced since the file was
        planned, and ``InvalidRequest`` if it had too many labels then."""
        if file.labels is None or isinstance(file.request, Failed):
            return
        document = self._seen.find_source(self._namespace, file.source)
        if document is None or document.content_hash != file.request.known_hash:
            raise Conflict("replaced or removed meanwhile: ingest it again", code="document_replaced")
        self._label(document, file.labels)

    def _fetched(self, source: str, fetch: Callable[[str], PlannedFile]) -> PlannedFile:
        try:
            return fetch(source)
        except RagserveError as error:
            return PlannedFile(source, Failed(str(error), error.code), found=is_elsewhere(source))
        except OSError:  # of this machine's disk: the network's are among the above
            raise
        except Exception as error:  # what a site sends must not end the job, whatever it does to a library
            log.exception("Fetching %r failed", source)
            reason = f"could not be fetched: {type(error).__name__}: {error}"
            return PlannedFile(source, Failed(reason, "fetch_error"))

    def _download(self, source: str) -> PlannedFile:
        got = self._fetcher.fetch(source, self._downloads)
        metadata = {"url": source, **self._metadata}
        return self._planned(
            source,
            str(got.path),
            got.filename,
            metadata,
            labels=self._labels,
            ext=got.ext,
            url=got.url,
            charset=got.charset,
        )

    def _from_folder(self, source: str) -> PlannedFile:
        path = self._downloads / "download"
        file, version = self._folders.fetch(source, path)
        filename, metadata = file.name.rpartition("/")[2], {"path": source, **self._metadata}
        return self._planned(
            source, str(path), filename, metadata, found=True, labels=self._labels, version=version
        )

    def _planned(
        self,
        source: str,
        path: str,
        filename: str,
        metadata: Mapping[str, Any],
        *,
        labels: Sequence[str] | None,
        title: str = "",
        ext: str | None = None,
        found: bool = False,
        **known: Any,
    ) -> PlannedFile:
        read_as = {"ext": ext, "parser": known.get("parser"), "charset": known.get("charset")}
        ext = os.path.splitext(filename)[1].lower() if ext is None else ext
        salt = self._salt(title, metadata, read_as)
        given = None if labels is None else tuple(labels)
        before = self._before(source)
        read, kept = (None, ()) if before is None else (before.content_hash, before.labels)
        request = ParseRequest(path, filename, ext, salt, read, **known)
        return PlannedFile(
            source, request, title, metadata, found, given, labels_before=kept if given is None else ()
        )

    def _salt(self, title: str, metadata: Mapping[str, Any], read_as: Mapping[str, str | None] = {}) -> str:
        return content_salt(self._settings, self._tokenizer, title, metadata, read_as)

    def _before(self, source: str) -> Document | None:
        """The document that is replaced."""
        try:
            return self._seen.find_source(self._namespace, source)
        except NotFound:  # the namespace does not exist before its first document
            return None

    def _label(self, document: Document, labels: tuple[str, ...] | None) -> None:
        if labels is not None and labels != document.labels:
            ids, read = [document.doc_id], document.content_hash
            self._seen.set_labels(self._namespace, ids, only=labels, content_hash=read, job_id=self._job_id)
