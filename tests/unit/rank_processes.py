"""Two ranks as processes that are forked from one, which imports what they need once for all tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from torch.multiprocessing import start_processes

from ragserve.config import DEFAULT_MODEL
from sglang_ext.cpu.torchvision import prepare
from tests.integration.forked_starts import start_module
from tests.unit.request_shapes import publish

Work = Callable[[int, Path], None]
"""What a rank does, with its number and a folder of both."""


def _both(work: Work, folder: Path) -> None:
    prepare()  # what they do may import SGLang
    publish(Path(DEFAULT_MODEL))
    start_processes(work, args=(folder,), nprocs=2, start_method="fork")


def _serve(connection: Connection) -> None:
    """Do what is asked for until nobody asks any more; answer each with its error, or None."""
    with suppress(EOFError):
        while True:
            work, folder = connection.recv()
            try:
                _both(work, folder)
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                connection.send(RuntimeError(str(error)))
            else:
                connection.send(None)


@contextmanager
def rank_processes() -> Iterator[Callable[[Work, Path], None]]:
    """Yield a function that lets two ranks work, and raises if one of them fails."""
    # a process of its own: a fork of this one would inherit the threads' locks, but not the threads
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "wb") as errors:
        process = start_module("tests.unit.rank_processes", (), {}, theirs, errors)
    with Connection(ours.detach()) as connection:

        def both(work: Work, folder: Path) -> None:
            connection.send((work, folder))
            if error := connection.recv():
                raise error

        yield both
    process.wait(240)


if __name__ == "__main__":
    asked = os.dup(1)
    os.dup2(2, 1)
    _serve(Connection(asked))
