"""Turn a job's source into a request for the parsing process: the file, its known hash, its metadata."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.errors import NotFound, RagserveError
from ragserve.ingest.fetch import Fetcher
from ragserve.ingest.parsing.parse_process import Failed, ParseRequest
from ragserve.ingest.pipeline import content_salt
from ragserve.ingest.planned import PlannedFile
from ragserve.ingest.sources import is_url
from ragserve.ingest.spool import Spool
from ragserve_index import IndexStore
from ragserve_index.types import Job

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
    ) -> None:
        self._settings = settings
        self._store = store
        self._namespace = job.namespace
        self._tokenizer = tokenizer
        self._downloads = downloads
        self._fetcher = fetcher
        self._metadata: Mapping[str, Any] = job.spec.get("metadata", {})
        self._named = frozenset(job.spec.get("named", ()))
        self._spool_folder: Path | None = None
        if "spool" in job.spec:
            self._spool_folder = spool.folder(job.spec["spool"])
            self._spooled = {file.source: file for file in spool.files(job.spec["spool"])}

    def plan(self, source: str) -> PlannedFile:
        """Plan one source, as a failure if it cannot be fetched. Raises ``OSError`` on a full disk."""
        if self._spool_folder is not None:
            return self._upload(source, self._spool_folder)
        if is_url(source):
            return self._download(source)
        metadata = {"path": source, **self._metadata}
        return self._planned(
            source, source, os.path.basename(source), metadata, found=source not in self._named
        )

    def _upload(self, source: str, folder: Path) -> PlannedFile:
        file = self._spooled.get(source)
        if file is None:
            return PlannedFile(source, Failed("not among the uploaded files", "unreadable"))
        if file.failed:
            return PlannedFile(source, Failed(file.failed, "unusable"))
        path, metadata = str(folder / file.stored), {"path": source, **file.metadata}
        return self._planned(source, path, file.filename, metadata, title=file.title, parser=file.parser)

    def _download(self, source: str) -> PlannedFile:
        try:
            got = self._fetcher.fetch(source, self._downloads)
        except RagserveError as error:
            return PlannedFile(source, Failed(str(error), error.code))
        except OSError:  # of this machine's disk: the network's are among the above
            raise
        except Exception as error:  # what a site sends must not end the job, whatever it does to a library
            log.exception("Fetching %r failed", source)
            reason = f"could not be fetched: {type(error).__name__}: {error}"
            return PlannedFile(source, Failed(reason, "fetch_error"))
        metadata = {"url": source, **self._metadata}
        return self._planned(
            source, str(got.path), got.filename, metadata, ext=got.ext, url=got.url, charset=got.charset
        )

    def _planned(
        self,
        source: str,
        path: str,
        filename: str,
        metadata: Mapping[str, Any],
        *,
        title: str = "",
        ext: str | None = None,
        found: bool = False,
        **known: Any,
    ) -> PlannedFile:
        ext = os.path.splitext(filename)[1].lower() if ext is None else ext
        salt = content_salt(self._settings, self._tokenizer, title, metadata)
        request = ParseRequest(path, filename, ext, salt, self._known_hash(source), **known)
        return PlannedFile(source, request, title, metadata, found)

    def _known_hash(self, source: str) -> str | None:
        try:
            document = self._store.find_source(self._namespace, source)
        except NotFound:  # the namespace does not exist before its first document
            return None
        return document.content_hash if document is not None else None
