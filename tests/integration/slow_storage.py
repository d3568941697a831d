"""A storage backend for SGLang's `dynamic` option that can be held, so that tests can watch requests wait for
the disk.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class SlowStorage(HiCacheStorage):
    """Keeps a file for each value in ``extra["folder"]``. A read waits while there is a file ``held`` in that
    folder.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._folder = Path(storage_config.extra_config["folder"])
        self._folder.mkdir(parents=True, exist_ok=True)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        while (self._folder / "held").exists():
            time.sleep(0.01)
        return [self.get(key) for key in keys]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        path = self._folder / key
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) if path.exists() else None

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        for key, value in zip(keys, values, strict=True):
            (self._folder / key).write_bytes(value.numpy().tobytes())
        return True

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return (self._folder / key).exists()

    def delete(self, key: str) -> bool:
        path = self._folder / key
        found = path.exists()
        path.unlink(missing_ok=True)
        return found

    def clear(self) -> None:
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)
