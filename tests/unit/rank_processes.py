"""Two ranks as processes that are forked from one, which imports what they need once for all tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torch.multiprocessing import start_processes

from ragserve.config import DEFAULT_MODEL
from sglang_ext.cpu.torchvision import prepare
from tests.unit.request_shapes import publish

Work = Callable[[int, Path], None]
"""What a rank does, with its number and a folder of both."""


def _both(work: Work, folder: Path) -> None:
    prepare()  # what they do may import SGLang
    publish(Path(DEFAULT_MODEL))
    start_processes(work, args=(folder,), nprocs=2, start_method="fork")


@contextmanager
def rank_processes() -> Iterator[Callable[[Work, Path], None]]:
    """Yield a function that lets two ranks work, and raises if one of them fails."""
    # a process of its own: a fork of this one would inherit the threads' locks, but not the threads
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as parent:
        yield lambda work, folder: parent.submit(_both, work, folder).result()
