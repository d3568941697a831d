"""A shared store that is a folder, such as an NFS mount, with a limit in bytes.

    <folder>/.ragserve-kv
    <folder>/v3-<model digest>/rank-0-of-1/<namespace>/<key>.pages

Documents appear by a rename and disappear by an unlink, whichever engine does so. A file that is unlinked
while another engine reads it stays readable there to the end of that read."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sglang_ext.documents.disk.disk import disk_is_full
from sglang_ext.documents.disk.page_files import DocumentFiles, PageFile
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import PageError, PageLayout, Record
from sglang_ext.documents.remote import own_folder
from sglang_ext.documents.remote.remote_backend import RemoteBackend, StoreAway

_COUNT_EVERY_S = 60.0  # other engines write, too: the sum is counted anew
_TEMPORARY_S = 3600.0  # age from which an unfinished file is one of a killed engine
_KEEP = 0.95  # share of the limit that an eviction leaves


class FolderBackend(RemoteBackend):
    """Document files in a folder that several engines read, write and evict from. Thread-safe."""

    def __init__(self, folder: Path, layout: PageLayout, budget_bytes: int) -> None:
        """``budget_bytes``: of all engines and models together. A ``folder`` that does not exist is one that
        is away, so it has to lie inside the mount: the mount's own folder is there without it."""
        self._folder = folder
        self._layout = layout
        self._budget = budget_bytes
        model = page_format.digest(layout.fingerprint).hex()[:32]
        self._root = folder / f"v{page_format.OLDEST}-{model}"
        self._files = DocumentFiles(self._root, rank=layout.rank, world=layout.world, writer=uuid.uuid4().hex)
        self._lock = threading.Lock()
        self._used = 0  # of all engines and models, as far as this one knows
        self._written = 0  # by this engine since the last count
        self._counted_at = -_COUNT_EVERY_S
        self.evictions = 0

    def find(self, key: str, namespace: str) -> Record | None:
        try:
            return self._files.read_record(namespace, key, self._layout)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreAway(f"reading {self._folder}: {error}") from error

    def write(self, record: Record, data: bytes, pages: Sequence[torch.Tensor], summary: bytes) -> bool:
        self._require()
        if record.file_bytes > self._budget:
            return False
        parts = [data, *(page.numpy() for page in pages), *([summary] if summary else [])]
        try:
            written = self._files.write(record.namespace, record.key, parts, fsync=False)
        except FileNotFoundError:  # another engine has removed the namespace's last document, and its folder
            return False
        except OSError as error:
            if disk_is_full(error):  # by what others have there, or below the limit: it can be read
                self._evict(lacking=record.file_bytes)
                raise
            raise StoreAway(f"writing to {self._folder}: {error}") from error
        self._evict(record.file_bytes)
        return written

    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        self._require()
        try:
            return self._files.replace_summary(old, data, summary, fsync=False)
        except (FileNotFoundError, PageError):
            return False
        except OSError as error:
            if disk_is_full(error):
                raise
            raise StoreAway(f"writing to {self._folder}: {error}") from error

    def read(self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor]) -> bool:
        buffers = [target.numpy() for target in targets]
        size = self._layout.page_bytes
        try:
            self._files.read_pages(record.namespace, record.key, size, blocks, buffers)
        except (FileNotFoundError, PageError):
            return False
        except OSError as error:
            raise StoreAway(f"reading {self._folder}: {error}") from error
        self._files.touch(record.namespace, record.key)
        return True

    def read_summary(self, record: Record) -> bytes | None:
        try:
            return self._files.read_summary(record)
        except (FileNotFoundError, PageError):
            return None
        except OSError as error:
            raise StoreAway(f"reading {self._folder}: {error}") from error

    def remove(self, keys: Collection[str], namespace: str) -> None:
        self._require()
        self._unlink([self._files.path(namespace, key) for key in keys])
        self._require()  # a mount that went meanwhile has confirmed nothing

    def remove_namespace(self, namespace: str) -> None:
        self._require()
        self._unlink([self._files.path(found.namespace, found.key) for found in self._scan(namespace)])
        self._require()

    def clear(self) -> None:
        self._require()
        self._unlink([self._files.path(found.namespace, found.key) for found in self._scan(None)])
        self._require()

    def check(self) -> None:
        self._require()
        self._evict()

    def stat(self) -> dict[str, Any]:
        return {"path": str(self._folder), "bytes": self._used, "budget_bytes": self._budget}

    def close(self) -> None:
        """Nothing is held open."""

    def _require(self) -> None:
        if not self._folder.is_dir():
            raise StoreAway(f"the folder {self._folder} is not there")
        try:
            own_folder.claim(self._folder)
        except own_folder.ForeignFolder as error:  # it was away at the start, which refuses it
            raise StoreAway(str(error)) from error
        except OSError as error:
            raise StoreAway(f"marking {self._folder}: {error}") from error

    def _scan(self, namespace: str | None) -> list[PageFile]:
        try:
            return list(self._files.scan(namespace))
        except OSError as error:
            raise StoreAway(f"listing {self._folder}: {error}") from error

    def _unlink(self, paths: Sequence[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except NotADirectoryError:
                continue
            except OSError as error:
                raise StoreAway(f"removing from {self._folder}: {error}") from error
            with suppress(OSError):  # it holds others, or another engine was faster
                path.parent.rmdir()

    def _evict(self, written: int = 0, *, lacking: int = 0) -> None:
        """Count the files of all engines and models now and then, and delete those that nobody has read for
        the longest time while they are too many bytes. ``lacking``: bytes that a full disk had no room for.
        """
        with self._lock:
            now = time.monotonic()
            self._used += written
            self._written += written
            much = self._used > self._budget or self._written > (1 - _KEEP) * self._budget
            if not much and not lacking and now - self._counted_at < _COUNT_EVERY_S:
                return
            self._counted_at, self._written = now, 0
            found = self._listed()
            self._used = sum(size for _, size, _ in found)
            if self._used > self._budget:
                most = self._budget * _KEEP
            elif lacking:
                most = self._used - lacking
            else:
                return
            for _, size, path in sorted(found):
                if self._used <= most:
                    break
                with suppress(OSError):
                    os.unlink(path)
                self._used -= size
                self.evictions += 1

    def _listed(self) -> list[tuple[float, int, str]]:
        """(last use, bytes, path) of each file of a store; what killed engines left unfinished is deleted."""
        found, old = [], time.time() - _TEMPORARY_S
        for path, finished in own_folder.own_files(self._folder):
            try:
                stat = path.stat()
                if not finished and stat.st_mtime < old:
                    path.unlink()
                else:
                    found.append((stat.st_mtime, stat.st_size, str(path)))
            except OSError:
                continue  # another engine has removed it
        return found
