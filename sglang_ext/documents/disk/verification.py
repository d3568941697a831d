"""Verification: read whole documents and check every byte. Imports neither torch nor SGLang, for the CLI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from sglang_ext.documents.disk.page_files import DocumentFiles, PageFile
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import PageError, PageLayout, Record


@dataclass(frozen=True)
class BadDocument:
    """A document that every lookup treats as a miss; ``reason`` starts with the word for it in README.md."""

    namespace: str
    key: str
    reason: str


@dataclass
class VerifyReport:
    """Counts of what was read, and what failed. ``integrity`` is empty, or the accounting error found."""

    documents: int = 0
    pages: int = 0
    bytes_: int = 0
    bad: list[BadDocument] = field(default_factory=list)
    integrity: str = ""

    @property
    def ok(self) -> bool:
        return not self.bad and not self.integrity

    def add(self, listed: Iterable[PageFile], read: Callable[[PageFile], Record]) -> None:
        """Read these documents; one that was removed since it was listed is left out."""
        for found in listed:
            try:
                record = read(found)
            except FileNotFoundError:
                continue
            except (PageError, OSError) as error:
                reason = error.reason if isinstance(error, PageError) else "io"
                self.bad.append(BadDocument(found.namespace, found.key, f"{reason}: {error}"))
                continue
            self.documents += 1
            self.pages += record.n_pages
            self.bytes_ += record.file_bytes


class Verification:
    """A reading of all documents on a thread of its own; ``report`` is done when it has ended."""

    def __init__(self, number: int, read: Callable[[], VerifyReport]) -> None:
        self.number = number
        self.report: Future[VerifyReport] = Future()
        threading.Thread(target=self._run, args=(read,), name="ragserve-verify", daemon=True).start()

    def _run(self, read: Callable[[], VerifyReport]) -> None:
        try:
            self.report.set_result(read())
        except Exception as error:  # noqa: BLE001 - raised to whoever asks for the report
            self.report.set_exception(error)


def read_document(files: DocumentFiles, found: PageFile, layout: PageLayout | None) -> Record:
    """Read a whole document file and check every page and the summary. Raises PageError or OSError.

    Where a summary is replaced meanwhile, the document is read again."""
    while True:
        record = files.read_record(found.namespace, found.key, layout)
        try:
            _check(files, record)
            return record
        except PageError:
            if files.read_record(found.namespace, found.key, layout) == record:
                raise


def _check(files: DocumentFiles, record: Record) -> None:
    buffer = bytearray(record.page_bytes)
    for block in range(record.n_pages):
        files.read_pages(record.namespace, record.key, record.page_bytes, [block], [buffer])
        if page_format.page_crc(record.key, block, buffer) != record.crcs[block]:
            raise PageError("crc", f"page {block} fails its CRC")
    summary = files.read_summary(record) if record.summary_bytes else b""
    if summary and page_format.summary_crc(record.key, summary) != record.summary_crc:
        raise PageError("crc", "the summary fails its CRC")
