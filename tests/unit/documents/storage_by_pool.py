"""A storage backend of the kind that reads and writes the registered host pool by address, as RDMA backends
do; pages in a dict.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

PAGES: dict[str, list[bytes]] = {}


class PoolStorage(HiCacheStorage):
    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.refuse = bool((storage_config.extra_config or {}).get("refuse"))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        if self.refuse:
            raise ConnectionError("the storage cluster is away")
        for i, key in enumerate(keys):
            PAGES[key] = [ctypes.string_at(pointers[j], sizes[j]) for j in (2 * i, 2 * i + 1)]
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        for i, key in enumerate(keys):
            for j, half in enumerate(PAGES.get(key, ())):
                assert sizes[2 * i + j] == len(half)
                ctypes.memmove(pointers[2 * i + j], half, len(half))
        return [key in PAGES for key in keys]

    def exists(self, key: str) -> bool:
        return key in PAGES

    def delete(self, key: str) -> bool:
        return PAGES.pop(key, None) is not None

    def clear(self) -> None:
        PAGES.clear()

    # Abstract in SGLang's interface, and unused with backends of this kind: a call of one of these four is a
    # failure of the test.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise AssertionError("a backend of this kind is called by pool index only")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise AssertionError("a backend of this kind is called by pool index only")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise AssertionError("a backend of this kind is called by pool index only")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise AssertionError("a backend of this kind is called by pool index only")


class KeepingStorage(PoolStorage):
    """Storage that cannot delete, as SGLang's interface allows."""

    delete = None  # type: ignore[assignment]
