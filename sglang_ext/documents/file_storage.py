"""The default disk backend: document files behind SGLang 0.5.16's ``HiCacheStorage``.

Keys are ``<namespace>@<document key>@<part>``, where a part is a block's number, ``record`` or ``summary``.
What is stored under a key is what any other backend would store: a page's bytes, or the document's record. A
document is the unit of writing: ``batch_set`` takes its record and all its pages and makes one file of them,
in one rename. Imports SGLang: call ``sglang_ext.cpu.torchvision.prepare()`` first."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from sglang_ext.documents import page_format
from sglang_ext.documents.page_files import DocumentFiles
from sglang_ext.documents.page_format import PageError, PageLayout

logger = logging.getLogger(__name__)
RECORD = "record"
SUMMARY = "summary"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def storage_key(namespace: str, key: str, part: int | str) -> str:
    return f"{namespace}@{key}@{part}"


class DocumentFileStorage(HiCacheStorage):
    """``on_fault(reason, message)`` hears of everything that turns into a miss. Values are uint8 tensors of
    one dimension on the CPU.
    """

    def __init__(
        self, files: DocumentFiles, layout: PageLayout, *, fsync: bool, on_fault: Callable[[str, str], None]
    ) -> None:
        self.files = files
        self._page_bytes = layout.page_bytes
        self._fsync = fsync
        self._on_fault = on_fault
        self.bytes_read = 0

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """The record (a fresh tensor), or the page in ``target_location`` or a fresh tensor; None for a miss.
        Pages are not CRC-checked.
        """
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """One answer per key, as ``get`` gives it. Only the pages asked for are read, and each document's
        file is opened once.
        """
        if not keys:
            return []
        names = [_split(key) for key in keys]
        namespace, document, part = names[0]
        if len(keys) > 1 and any(
            name[:2] != (namespace, document) or name[2] in (RECORD, SUMMARY) for name in names
        ):
            return [
                self.batch_get([key], None if target_locations is None else [target_locations[i]])[0]
                for i, key in enumerate(keys)
            ]
        try:
            if part == RECORD:
                return [
                    torch.frombuffer(
                        bytearray(self.files.read_raw_record(namespace, document)[0]), dtype=torch.uint8
                    )
                ]
            if part == SUMMARY:
                data, _ = self.files.read_raw_record(namespace, document)
                found = self.files.read_summary(page_format.decode(data, layout=None, key=document))
                return [torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else None]
            if target_locations is None:
                target_locations = [torch.empty(self._page_bytes, dtype=torch.uint8) for _ in keys]
            blocks = [int(name[2]) for name in names]
            self.bytes_read += self.files.read_pages(
                namespace, document, self._page_bytes, blocks, [target.numpy() for target in target_locations]
            )
        except FileNotFoundError:
            return [None] * len(keys)
        except (PageError, OSError) as error:
            self._on_fault(
                error.reason if isinstance(error, PageError) else "io",
                f"reading document {document}: {error}",
            )
            return [None] * len(keys)
        return list(target_locations)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """As ``batch_set`` of one key: only what is there already can be set alone."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write one document: its record, its pages 0, 1, ... and its summary, if any.

        False when it is refused, removed meanwhile, or the disk fails.
        """
        names = [_split(key) for key in keys]
        namespace, document, _ = names[0]
        summary = [(namespace, document, SUMMARY)] if names[-1][2] == SUMMARY else []
        pages = len(keys) - 1 - len(summary)
        expected = [
            (namespace, document, RECORD),
            *((namespace, document, str(block)) for block in range(pages)),
            *summary,
        ]
        if names != expected or len(keys) < 2 or values is None:
            known = all(self.exists(key) for key in keys)
            if not known:
                self._on_fault(
                    "refused", f"document {document}: a document is written as a whole, its record first"
                )
            return known
        try:
            return self.files.write(
                namespace, document, [value.numpy() for value in values], fsync=self._fsync
            )
        except OSError as error:
            self._on_fault(
                "disk_full" if error.errno in FULL else "io", f"writing document {document}: {error}"
            )
            return False

    def exists(self, key: str) -> bool:
        namespace, document, part = _split(key)
        if part == RECORD:
            return self.files.find(namespace, document) is not None
        try:
            data, _ = self.files.read_raw_record(namespace, document)
            record = page_format.decode(data, layout=None, key=document)
        except (PageError, OSError):
            return False
        return record.summary_bytes > 0 if part == SUMMARY else 0 <= int(part) < record.n_pages

    def delete(self, key: str) -> bool:
        """Remove the whole document that the key belongs to. Not part of SGLang's interface: deleting must
        mean deleting here.
        """
        namespace, document, _ = _split(key)
        return self.files.remove(namespace, document)

    def clear(self) -> None:
        for namespace in self.files.namespaces():
            self.files.remove_namespace(namespace)
        self.files.sweep_trash()

    def get_stats(self) -> dict[str, int]:
        return {"bytes_read": self.bytes_read}


def _split(key: str) -> tuple[str, str, str]:
    namespace, document, part = key.split("@")
    return namespace, document, part
