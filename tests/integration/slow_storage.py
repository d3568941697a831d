"""A storage backend for SGLang's `dynamic` option whose reads take as long as a file says: what waits for the
disk can be watched.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class SlowStorage(HiCacheStorage):
    """One file per value under ``extra["folder"]``. Reading pages first sleeps the seconds in the file
    ``delay`` there, if it exists.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._folder = Path(storage_config.extra_config["folder"])
        self._folder.mkdir(parents=True, exist_ok=True)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        delay = self._folder / "delay"
        if delay.exists():
            time.sleep(float(delay.read_text()))
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
