"""Troubles of a machine while a block lasts: a full or read-only disk, a wrong clock, no descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

SIZE = 16 * 2**20


class Volume:
    """A mounted tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", str(path))

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def full(self, left: int) -> Iterator[None]:
        """Only ``left`` bytes are free, rounded down to pages."""
        filler = self.path / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free_bytes() - left))
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        _mount("--bind", str(self.path), str(self.path))
        _mount("-o", "remount,bind,ro", str(self.path))
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextlib.contextmanager
def clock(shift_s: float) -> Iterator[None]:
    real = time.time
    with mock.patch("time.time", side_effect=lambda: real() + shift_s):
        yield


@contextlib.contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Only ``left`` more file descriptors can be opened in this process. None: nor those that another thread
    or the garbage collector closes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) if left else 0  # 0 is always open
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while left:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(min(left, len(taken))):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
