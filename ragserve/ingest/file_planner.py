"""From a job's source to what the parsing process is asked: which file, what is known of it, what its
metadata will be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragserve.errors import NotFound, RagserveError
from ragserve.ingest.fetch import fetch
from ragserve.ingest.parsing.parse_process import Failed, ParseRequest
from ragserve.ingest.pipeline import Work, content_salt
from ragserve.ingest.sources import is_url
from ragserve.ingest.spool import Spool
from ragserve_index import IndexStore
from ragserve_index.types import Job

__all__ = ["FilePlanner"]


class FilePlanner:
    """Used by one thread. Downloads go to ``downloads``, one at a time."""

    def __init__(
        self,
        store: IndexStore,
        spool: Spool,
        job: Job,
        tokenizer: str,
        chunk_tokens: int,
        max_bytes: int,
        downloads: Path,
    ) -> None:
        self._store = store
        self._namespace = job.namespace
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._max_bytes = max_bytes
        self._downloads = downloads
        self._metadata: Mapping[str, Any] = job.spec.get("metadata", {})
        self._spooled = (
            {file.source: file for file in spool.files(job.spec["spool"])} if "spool" in job.spec else {}
        )
        self._spool_folder = spool.folder(job.spec["spool"]) if "spool" in job.spec else None

    def plan(self, source: str) -> Work | tuple[str, Failed]:
        """What to do for one source; a failure where it cannot even be fetched. A full disk raises
        ``OSError``.
        """
        if self._spool_folder is not None:
            return self._spooled_file(source, self._spool_folder)
        if is_url(source):
            return self._download(source)
        name = os.path.basename(source)
        return self._work(source, source, name, _extension(name), "", {"path": source, **self._metadata})

    def _spooled_file(self, source: str, folder: Path) -> Work | tuple[str, Failed]:
        file = self._spooled.get(source)
        if file is None:
            return source, Failed("not among the uploaded files", "unreadable")
        ext, metadata = _extension(file.filename), {"path": source, **file.metadata}
        return self._work(
            source, str(folder / file.stored), file.filename, ext, file.title, metadata, parser=file.parser
        )

    def _download(self, source: str) -> Work | tuple[str, Failed]:
        try:
            got = fetch(source, self._downloads, max_bytes=self._max_bytes)
        except RagserveError as error:
            return source, Failed(str(error), error.code)
        metadata = {"url": source, **self._metadata}
        return self._work(
            source, str(got.path), got.filename, got.ext, "", metadata, url=got.url, charset=got.charset
        )

    def _work(
        self,
        source: str,
        path: str,
        filename: str,
        ext: str,
        title: str,
        metadata: Mapping[str, Any],
        **extra: str | None,
    ) -> Work:
        salt = content_salt(self._tokenizer, self._chunk_tokens, title, metadata)
        return Work(
            source,
            ParseRequest(path, filename, ext, salt, self._known_hash(source), **extra),
            title,
            metadata,
        )

    def _known_hash(self, source: str) -> str | None:
        try:
            document = self._store.find_source(self._namespace, source)
        except NotFound:  # the namespace does not exist before its first document
            return None
        return document.content_hash if document is not None else None


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()
