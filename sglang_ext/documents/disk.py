"""The disk tier: documents on top of SGLang's ``HiCacheStorage``, whichever backend it is.

Everything that comes up is checked here, against the document's record and each page's CRC, because other
backends check nothing."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from sglang_ext.documents import page_format
from sglang_ext.documents.page_files import DocumentFiles, PageFile, verify_document
from sglang_ext.documents.page_format import PageError, PageLayout, Record
from sglang_ext.documents.types import OWN_BACKEND, DiskConfig, StoreInUse

logger = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0


class Faults:
    """Counts what went wrong by reason, tells ``on_count``, and logs each reason at most once a minute."""

    def __init__(self, on_count: Callable[[str], None]) -> None:
        self._on_count = on_count
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def __call__(self, reason: str, message: str) -> None:
        now = time.monotonic()
        with self._lock:
            self.counts[reason] += 1
            quiet = now - self._logged.get(reason, -_LOG_EVERY_S) < _LOG_EVERY_S
            if not quiet:
                self._logged[reason] = now
        self._on_count(reason)
        if not quiet:
            logger.warning(
                "document cache, %s: %s (further ones of this kind within a minute are only counted)",
                reason,
                message,
            )


class DiskTier(ABC):
    """Called from the store's thread (``find``, ``remove``) and from its IO threads. ``faults`` hears of
    every miss that should not be.
    """

    has_folder = False  # documents can be listed, and the budget is ours to keep

    def __init__(self, layout: PageLayout, faults: Faults) -> None:
        self.layout = layout
        self.faults = faults

    @abstractmethod
    def find(self, key: str, namespace: str) -> Record | None:
        """The record, checked; None for a miss. Raises PageError when there is one that must not be used."""

    def begin(self, key: str, namespace: str) -> None:  # noqa: B027 - optional, as the others without a body
        """A ``write`` follows; called under the store's lock, which orders it against removals."""

    @abstractmethod
    def write(
        self,
        record: Record,
        data: bytes,
        pages: Sequence[torch.Tensor],
        numbers: Sequence[int] | None,
        summary: bytes,
    ) -> bool:
        """Record bytes, all pages (uint8 [page_bytes]) and the summary (empty: none); ``numbers``: the pages'
        places in the host pool, None outside it."""

    @abstractmethod
    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        """Give a document another record and summary, its pages left as they are. Raises OSError or
        PageError.
        """

    @abstractmethod
    def read_summary(self, record: Record) -> bytes | None:
        """The summary's bytes, unchecked; None for a miss. Raises OSError or PageError."""

    @abstractmethod
    def read(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> list[bool]:
        """Fill the targets; one answer per block, unchecked."""

    @abstractmethod
    def verify(self, found: PageFile) -> Record:
        """Read everything of a document. Raises PageError or OSError."""

    @abstractmethod
    def remove(self, key: str, namespace: str, record: Record | None) -> bool:
        """Whether something was removed. Backends that delete value by value need the record."""

    def remove_namespace(self, namespace: str) -> list[str]:
        """Keys removed beyond those the caller knows of."""
        return []

    def clear(self) -> None:  # noqa: B027
        """Remove everything of this rank."""

    def sweep(self) -> None:  # noqa: B027
        """Give space back; slow, in an IO thread."""

    def touch(self, key: str, namespace: str) -> None:  # noqa: B027
        """Note a use for the order of eviction after a restart."""

    def close(self) -> None:  # noqa: B027
        """Let go of the folder or connection."""

    def why_absent(self, record: Record) -> str:
        """After a read that found nothing: `missing`, or `unreadable` where the cause has been counted."""
        return "missing"

    def load_summary(self, record: Record) -> bytes | None:
        """The document's summary, checked; None, and counted, where it cannot be used."""
        try:
            data = self.read_summary(record)
        except (PageError, OSError) as error:
            self.faults(
                error.reason if isinstance(error, PageError) else "io",
                f"reading the summary of document {record.key}: {error}",
            )
            return None
        if data is not None and page_format.summary_crc(record.key, data) != record.summary_crc:
            self.faults("crc", f"the summary of document {record.key} fails its CRC")
            return None
        return data

    def load(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> str:
        """Fill the targets and check every page; the reason of failure, or an empty string."""
        answers = self.read(record, blocks, targets, numbers)
        for block, target, found in zip(blocks, targets, answers, strict=True):
            if not found:
                return self.why_absent(record)
            if page_format.page_crc(record.key, block, target.numpy()) != record.crcs[block]:
                self.faults("crc", f"page {block} of document {record.key} fails its CRC")
                return "crc"
        return ""


class FileTier(DiskTier):
    """Our own document files, the default. Every file is found, counted and removed by its path."""

    has_folder = True

    def __init__(self, files: DocumentFiles, layout: PageLayout, faults: Faults, *, fsync: bool) -> None:
        super().__init__(layout, faults)
        from sglang_ext.documents.file_storage import DocumentFileStorage

        self.files = files
        self._fsync = fsync
        self.storage = DocumentFileStorage(files, layout, fsync=fsync, on_fault=faults)

    def find(self, key: str, namespace: str) -> Record | None:
        from sglang_ext.documents.file_storage import RECORD, storage_key

        found = self.files.find(namespace, key)
        data = None if found is None else self.storage.get(storage_key(namespace, key, RECORD))
        if found is None or data is None:
            return None
        record = page_format.decode(data.numpy().tobytes(), layout=self.layout, key=key)
        if record.namespace != namespace:
            raise PageError(
                "namespace", f"a document of namespace {record.namespace!r} lies under {namespace!r}"
            )
        if found.size != record.file_bytes:
            raise PageError(
                "truncated", f"document {key}: {found.size} bytes, a whole file has {record.file_bytes}"
            )
        return record

    def begin(self, key: str, namespace: str) -> None:
        self.files.begin(namespace, key)

    def write(
        self,
        record: Record,
        data: bytes,
        pages: Sequence[torch.Tensor],
        numbers: Sequence[int] | None,
        summary: bytes,
    ) -> bool:
        from sglang_ext.documents.file_storage import RECORD, SUMMARY, storage_key

        parts: list[int | str] = [RECORD, *range(record.n_pages), *([SUMMARY] if summary else [])]
        ends = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (data, summary) if part]
        keys = [storage_key(record.namespace, record.key, part) for part in parts]
        return self.storage.batch_set(keys, [ends[0], *pages, *ends[1:]])

    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        return self.files.replace_summary(old, data, summary, fsync=self._fsync)

    def read_summary(self, record: Record) -> bytes | None:
        return self.files.read_summary(record)

    def read(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> list[bool]:
        from sglang_ext.documents.file_storage import storage_key

        keys = [storage_key(record.namespace, record.key, block) for block in blocks]
        return [value is not None for value in self.storage.batch_get(keys, targets)]

    def remove(self, key: str, namespace: str, record: Record | None) -> bool:
        return self.files.remove(namespace, key)

    def remove_namespace(self, namespace: str) -> list[str]:
        return self.files.remove_namespace(namespace)

    def clear(self) -> None:
        for namespace in self.files.namespaces():
            self.files.remove_namespace(namespace)

    def sweep(self) -> None:
        self.files.sweep_trash()

    def touch(self, key: str, namespace: str) -> None:
        self.files.touch(namespace, key)

    def close(self) -> None:
        self.files.release()

    def why_absent(self, record: Record) -> str:
        return "missing" if self.files.find(record.namespace, record.key) is None else "unreadable"

    # only where there is a folder

    def locate(self, key: str, namespace: str | None) -> PageFile | None:
        """By path, in the namespace or, without one, in each there is."""
        names = self.files.namespaces() if namespace is None else [namespace]
        return next(
            (found for found in (self.files.find(name, key) for name in names) if found is not None), None
        )

    def scan(self) -> Iterator[PageFile]:
        return self.files.scan()

    def verify(self, found: PageFile) -> Record:
        return verify_document(self.files, found, self.layout)


def open_disk(
    config: DiskConfig, layout: PageLayout, faults: Faults, make_other: Callable[[], DiskTier]
) -> DiskTier:
    """The tier for a configuration. Raises StoreInUse when another process owns the folder."""
    if config.backend != OWN_BACKEND:
        return make_other()
    from sglang_ext.cpu.torchvision import prepare

    prepare()
    files = DocumentFiles(Path(str(config.path)), rank=layout.rank, world=layout.world)
    if not files.acquire():
        raise StoreInUse(
            f"the document folder {config.path} is used by another server: give each its own, or stop the other one"
        )
    files.sweep()
    return FileTier(files, layout, faults, fsync=config.fsync == "document")
