"""Documents on SGLang's own storage backends: sglang-file (its `file`), nixl, mooncake, hf3fs, aibrix, eic,
simm, mori and dynamic.

These store values of one size, know no documents and mostly cannot delete. A document is stored as its pages,
then as many values of page size as its summary and its record need. The record comes last and carries every
page's CRC: an unfinished document is not found, a damaged one is a miss. Keys are ``<document key>@<part>``;
the namespace is in the key's digest and in the record."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_ext.documents.disk.disk import DiskTier, Faults
from sglang_ext.documents.disk.page_files import PageFile
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.host import HostTier
from sglang_ext.documents.pages.page_format import PageError, PageLayout, Record
from sglang_ext.documents.pages.types import SGLANG_FILE, DiskConfig

logger = logging.getLogger(__name__)
# As in SGLang's cache controller: these take indices into the registered host pool instead of tensors.
_BY_POOL_INDEX = frozenset({"hf3fs", "mooncake", "eic", "nixl", "simm", "mori"})
_FOLDER_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_RECORD = "r"
_SUMMARY = "s"


def by_pool_index(config: DiskConfig) -> bool:
    """True if the backend accesses the host pool by index; its records then go through the scratch pages."""
    return config.backend in _BY_POOL_INDEX or (
        config.backend == "dynamic" and bool((config.extra or {}).get("interface_v1"))
    )


class HostPoolView:
    """Our host pool with SGLang's interface: page-first order, token index = page * page_size + offset.

    A page's two halves are its K and its V, each over all layers."""

    layout = "page_first_direct"

    def __init__(self, host: HostTier) -> None:
        shape = host.shape
        self._host = host
        self.kv_buffer = host.pool
        self.page_size = shape.block
        self.page_num = len(host.pool)
        self.size = self.page_num * shape.block
        self.dtype = shape.page_dtype
        self.device = "cpu"
        self.pin_memory = False
        self.layer_num, self.head_num, self.head_dim = shape.layers, shape.kv_heads, shape.head_dim
        self.start_layer, self.end_layer = 0, shape.layers
        self.size_per_token = shape.page_bytes // shape.block
        self.device_pool = self  # aibrix reads dtype, layers and heads from it
        self.allocator = None

    def get_size_per_token(self) -> int:
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        return self.size_per_token // 2

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[int(index) // self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self._host.shape.page_shape, dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        self.kv_buffer[int(index) // self.page_size] = data_page.reshape(self._host.shape.page_shape)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        half = self._host.shape.page_bytes // 2
        base, firsts = self.kv_buffer.data_ptr(), indices.tolist()[:: self.page_size]
        starts = [base + index // self.page_size * 2 * half for index in firsts]
        return [pointer for start in starts for pointer in (start, start + half)], [half] * (2 * len(starts))

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return (
            self._host.shape.page_bytes // 2 % page_size_bytes == 0
            and self.kv_buffer.data_ptr() % page_size_bytes == 0
        )


class BackendTier(DiskTier):
    """Documents in one of SGLang's backends, which keeps its own limits; what it drops is a miss here."""

    def __init__(
        self, config: DiskConfig, layout: PageLayout, faults: Faults, host: HostTier, *, model_name: str
    ) -> None:
        super().__init__(layout, faults)
        self._host = host
        self._by_index = by_pool_index(config)
        self._reading = threading.Lock()
        self._storage = _create(config, layout, HostPoolView(host), model_name)
        self._delete = _deleter(self._storage)
        if self._delete is None:
            logger.warning(
                "the storage backend %s cannot delete: removed documents are no longer served, but their "
                "pages stay there until the backend drops them. Where removed must mean erased, use the "
                "default backend.",
                config.backend,
            )

    def find(self, key: str, namespace: str) -> Record | None:
        first = self._get_values([f"{key}@{_RECORD}0"])
        if first is None:
            return None
        total = page_format.record_length(first[: page_format.FIXED_BYTES])
        data = first
        if total > len(first):
            more = self._get_values([f"{key}@{_RECORD}{i}" for i in range(1, self._values(total))])
            if more is None:
                raise PageError("truncated", f"document {key}: part of its record is gone")
            data += more
        record = page_format.decode(data, layout=self.layout, key=key)
        if namespace and record.namespace != namespace:
            raise PageError(
                "namespace", f"document {key} belongs to namespace {record.namespace!r}, not {namespace!r}"
            )
        return record

    def write(
        self,
        record: Record,
        data: bytes,
        pages: Sequence[torch.Tensor],
        numbers: Sequence[int] | None,
        summary: bytes,
    ) -> bool:
        keys = [f"{record.key}@{block}" for block in range(record.n_pages)]
        if self._by_index and numbers is None:
            self.faults(
                "refused",
                f"document {record.key} does not fit on host, where this backend takes its pages from",
            )
            return False
        stored = (
            (self._set_pool(keys, numbers or ()) if self._by_index else self._set_tensors(keys, pages))
            and self._set_values(record.key, _SUMMARY, summary)
            and self._set_values(record.key, _RECORD, data)
        )
        if not stored:
            self.faults("backend", f"the storage backend did not store document {record.key}")
        return stored

    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        if self._delete is not None:  # some backends do not overwrite a key's value
            names = [f"{old.key}@{_RECORD}{i}" for i in range(self._values(old.record_bytes))]
            names += [f"{old.key}@{_SUMMARY}{i}" for i in range(self._values(old.summary_bytes))]
            for name in names:
                self._guarded(partial(self._delete, name))
        return self._set_values(record.key, _SUMMARY, summary) and self._set_values(record.key, _RECORD, data)

    def read_summary(self, record: Record) -> bytes | None:
        parts = range(self._values(record.summary_bytes))
        data = self._get_values([f"{record.key}@{_SUMMARY}{i}" for i in parts])
        return None if data is None else data[: record.summary_bytes]

    def read(
        self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> str:
        keys = [f"{record.key}@{block}" for block in blocks]
        try:
            if self._by_index:
                found = self._storage.batch_get_v1(keys, self._indices(numbers))
                return "" if all(found) else "missing"
            answers = self._storage.batch_get(keys, list(targets))
        except Exception as error:  # noqa: BLE001 - whatever another library raises is a miss here
            self.faults("backend", f"reading document {record.key}: {error!r}")
            return "unreadable"
        for target, answer in zip(targets, answers, strict=True):
            if answer is None:
                return "missing"
            if answer.data_ptr() != target.data_ptr():
                target.copy_(answer.view(torch.uint8))
        return ""

    def remove(self, key: str, namespace: str, record: Record | None) -> bool:
        if self._delete is None or record is None:
            return False
        # The record goes first: without it nothing of the document is found.
        keys = [f"{key}@{_RECORD}{i}" for i in range(self._values(record.record_bytes))]
        keys += [f"{key}@{block}" for block in range(record.n_pages)]
        keys += [f"{key}@{_SUMMARY}{i}" for i in range(self._values(record.summary_bytes))]
        try:
            answers = [self._delete(part) for part in keys]
        except Exception as error:
            raise PageError("backend", repr(error)) from error
        return any(answer is not False for answer in answers)

    def verify(self, found: PageFile) -> Record:
        record = self.find(found.key, found.namespace)
        if record is None:
            raise FileNotFoundError(found.key)
        number = self._host.scratch[2] if self._by_index else -1
        target = (
            self._host.page_view(number)
            if self._by_index
            else torch.empty(self.layout.page_bytes, dtype=torch.uint8)
        )
        for block in range(record.n_pages):
            reason = self.load(record, [block], [target], [number])
            if reason:
                raise PageError(reason, f"page {block} is not what was stored")
        if record.summary_bytes and self.load_summary(record) is None:
            raise PageError("crc", "the summary is not what was stored")
        return record

    def clear(self) -> None:
        self._storage.clear()

    def close(self) -> None:
        close = getattr(self._storage, "close", None)
        if close is not None:
            close()

    def _values(self, total: int) -> int:
        return -(-total // self.layout.page_bytes)

    def _indices(self, numbers: Sequence[int]) -> torch.Tensor:
        """Token indices of host pages, for the v1 interface."""
        block = self.layout.block
        return (torch.tensor(numbers, dtype=torch.int64)[:, None] * block + torch.arange(block)).flatten()

    def _get_values(self, keys: list[str]) -> bytes | None:
        """Read and join values of page size; None unless all are there. One caller at a time, because reads
        share a scratch page.
        """
        scratch = self._host.scratch[0] if self._by_index else -1
        data = b""
        try:
            with self._reading:
                for key in keys:
                    if not self._storage.exists(key):
                        return None
                    if not self._by_index:
                        value = self._storage.get(key, torch.empty(self.layout.page_bytes, dtype=torch.uint8))
                    elif self._storage.batch_get_v1([key], self._indices([scratch]))[0]:
                        value = self._host.page_view(scratch)
                    else:
                        value = None
                    if value is None:
                        return None
                    data += value.numpy().tobytes()
        except Exception as error:  # noqa: BLE001 - as above
            self.faults("backend", f"reading a document's record or summary: {error!r}")
            return None
        return data

    def _set_values(self, key: str, part: str, data: bytes) -> bool:
        """Store bytes as values of page size, the last one padded."""
        size = self.layout.page_bytes
        for i in range(self._values(len(data))):
            value = torch.frombuffer(
                bytearray(data[i * size : (i + 1) * size].ljust(size, b"\0")), dtype=torch.uint8
            )
            name = f"{key}@{part}{i}"
            if self._by_index:
                scratch = self._host.scratch[1]  # the writer's page; page 0 is the reader's
                self._host.page_view(scratch).copy_(value)
                if not self._set_pool([name], [scratch]):
                    return False
            elif not self._set_tensors([name], [value]):
                return False
        return True

    def _set_pool(self, keys: list[str], numbers: Sequence[int]) -> bool:
        return self._guarded(lambda: all(self._storage.batch_set_v1(keys, self._indices(numbers))))

    def _set_tensors(self, keys: list[str], values: Sequence[torch.Tensor]) -> bool:
        return self._guarded(lambda: self._storage.batch_set(keys, list(values)))

    def _guarded(self, call: Any) -> bool:
        try:
            return bool(call())
        except Exception as error:  # noqa: BLE001 - as above
            self.faults("backend", f"writing to the storage backend: {error!r}")
            return False


def _create(config: DiskConfig, layout: PageLayout, view: HostPoolView, model_name: str) -> Any:
    from sglang_ext.cpu.torchvision import prepare

    prepare()
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    storage_config = HiCacheStorageConfig(
        tp_rank=layout.rank,
        tp_size=layout.world,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model_name,
        extra_config=config.extra,
    )
    own_file = config.backend == SGLANG_FILE
    with _folder(config.path if own_file else None):
        storage = StorageBackendFactory.create_backend(
            "file" if own_file else config.backend, storage_config, view
        )
    storage.register_mem_pool_host(view)
    return storage


@contextmanager
def _folder(path: Path | None) -> Iterator[None]:
    """Set the folder of SGLang's file backend, which reads it from the environment and creates it for rank 0
    only.
    """
    if path is None:
        yield
        return
    path.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(_FOLDER_VARIABLE)
    os.environ[_FOLDER_VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FOLDER_VARIABLE]
        else:
            os.environ[_FOLDER_VARIABLE] = before


def _deleter(storage: Any) -> Any:
    """A function that deletes one key, or None. SGLang's interface has none, so it depends on the backend."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    if isinstance(storage, HiCacheFile):

        def delete_file(key: str) -> bool:
            name = storage._get_suffixed_key(key)
            path = Path(storage.file_path, f"{name}.bin")
            found = path.exists()
            path.unlink(missing_ok=True)
            if storage.metadata_cache is not None:
                storage.metadata_cache.remove(name)
            return found

        return delete_file
    return getattr(storage, "delete", None)
